"""What a run of chaos came to, for people and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.clients import Tally
from benchmarks.chaos.disturbances import Recovery
from benchmarks.metrics import Metric, rounded

GOALS: tuple[tuple[str, str, str | None], ...] = (
    ("requests_lost", "requests", "==0"),
    ("tokens_wrong", "tokens", "==0"),
    ("leases_left", "leases", "==0"),
    ("charges_left", "charges", "==0"),
    ("segments_left", "segments", "==0"),
    ("fds_grown", "descriptors", "==0"),
    ("recovery_s_p95", "s", "<=5"),
    ("rejoin_s_p95", "s", "<=2"),
    ("requests_exact", "requests", None),
    ("requests_ended_with_error", "requests", None),
    ("disturbances", "disturbances", None),
)


@dataclass(frozen=True)
class PhaseResult:
    """One phase: mock engines, or real ones."""

    name: str
    seconds: float
    tally: Tally
    disturbances: Counter[str]
    recoveries: Sequence[Recovery]
    leases: int
    charges: int
    segments: Sequence[str]
    fds_grown: int
    rejoined: Sequence[float]
    """Seconds until a new worker was used, from when it was ready."""
    moved: int
    """How often a request went on with another worker, as far as living frontends know."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def table(phases: Sequence[PhaseResult]) -> str:
    """For people."""
    lines = []
    for phase in phases:
        tally = phase.tally
        lines += [
            f"\n{phase.name}, {phase.seconds:.0f} s",
            f"  {'requests':34}{tally.asked:8}",
            f"  {'finished, token for token':34}{tally.exact:8}",
            f"  {'finished otherwise':34}{_others(tally):8}",
            f"  {'lost':34}{len(tally.lost):8}",
        ]
        lines += [f"  {'ended: ' + why:34}{count:8}" for why, count in tally.ended.items()]
        lines.append(f"  {'moved to another worker':34}{phase.moved:8}")
        lines += [
            f"  {what:34}{count:8}" for what, count in sorted(phase.disturbances.items())
        ]
        for kind in ("worker", "frontend"):
            clients = [r for r in phase.recoveries if r.what == kind]
            seconds = [r.counted for r in clients]
            if seconds:
                half, most = percentile(seconds, 0.5), percentile(seconds, 0.95)
                lines.append(
                    f"  recovery from a killed {kind}, {len(seconds)} clients: median "
                    f"{half:.2f} s, p95 {most:.2f} s, longest {max(seconds):.2f} s"
                )
            if paused := [r for r in clients if r.paused]:
                lines.append(
                    f"  the frontend of {len(paused)} of them was paused meanwhile, and with "
                    f"that the longest {max(r.seconds for r in paused):.2f} s"
                )
        if phase.rejoined:
            lines.append(
                f"  a new worker was used by all frontends {max(phase.rejoined):.2f} s after "
                "it was ready, at the latest"
            )
        lines.append(
            f"  left: {phase.leases} leases, {phase.charges} charges, "
            f"{len(phase.segments)} segments, {phase.fds_grown} more descriptors"
        )
    return "\n".join(lines)


def metrics(phases: Sequence[PhaseResult]) -> list[Metric]:
    """Sums over the phases, and the recovery of all clients."""
    seconds = [recovery.counted for phase in phases for recovery in phase.recoveries]
    rejoined = [each for phase in phases for each in phase.rejoined]
    values: dict[str, float | None] = {
        "requests_lost": sum(len(phase.tally.lost) for phase in phases),
        "tokens_wrong": sum(phase.tally.tokens_wrong for phase in phases),
        "leases_left": sum(phase.leases for phase in phases),
        "charges_left": sum(phase.charges for phase in phases),
        "segments_left": sum(len(phase.segments) for phase in phases),
        "fds_grown": sum(phase.fds_grown for phase in phases),
        "recovery_s_p95": rounded(percentile(seconds, 0.95)) if seconds else None,
        "rejoin_s_p95": rounded(percentile(rejoined, 0.95)) if rejoined else None,
        "requests_exact": sum(phase.tally.exact for phase in phases),
        "requests_ended_with_error": sum(
            sum(phase.tally.ended.values()) for phase in phases
        ),
        "disturbances": sum(sum(phase.disturbances.values()) for phase in phases),
    }
    return [
        Metric(name, value, unit, goal, None if value is not None else "nobody was killed")
        for name, unit, goal in GOALS
        for value in [values[name]]
    ]


def _others(tally: Tally) -> int:
    return tally.asked - tally.exact - len(tally.lost) - sum(tally.ended.values())
