"""What a frontend and a worker say to each other.

Every message is one msgspec Struct, tagged by its class name, in the first frame. Some
carry more frames behind it, in vLLM's own encoding, see ``transfer.payload``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from transfer.errors import BadMessage
from transfer.process import Process
from transfer.tensor_ref import ArenaId, EntryRef, RemoteArena

PROTOCOL_VERSION = 7

Frame = bytes | bytearray | memoryview


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""How many of something."""

Total = Annotated[int, msgspec.Meta(ge=0)]
"""A sum of counts; up to 2**16 of them fit into a message."""

MOST_SECONDS = 60.0


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's engine is, stated when it registers.

    A frontend compares these with its own settings and with the first worker's, and
    refuses a worker that differs, naming the field.
    """

    protocol: int
    engine: str = "vllm"
    """``vllm``, or ``mock`` for a simulated one: never both in one fleet."""
    role: str = "generate"
    """``generate``, or ``encode`` for an engine that runs the vision encoder only."""
    vllm_version: str
    model: str
    revision: str
    dtype: str
    block_size: int
    """Tokens per hashed block."""
    hash_algorithm: str
    root_hash: str
    """Hex digest that every chain of block hashes starts from."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    encoder_cache_tokens: int
    """Embedding tokens that one item may have at most."""
    num_kv_blocks: int
    mm_device_do_normalize: bool
    """Whether the model normalizes pixels itself, so that they arrive as uint8."""
    mm_processor_kwargs: str
    """JSON of the processor options given on the command line."""
    lora: str
    """JSON of the LoRA settings, empty when LoRA is off."""
    reasoning_parser: str
    identity_seed_fingerprint: str
    """Names the secret seed of image identities without telling it; empty: any."""
    drops_last_matched_block: bool = False
    """Whether the engine computes the last block it finds cached once more, as it does to
    give a drafting head (EAGLE, MTP) its hidden states."""
    own_logits_processors: bool = False
    """Whether the engine runs logits processors that are not vLLM's own. Nobody knows what
    they remember of an answer."""


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """A frontend introduces itself. Answered by ``Ready`` or ``Refused``."""

    frontend: str
    protocol: int
    arena: ArenaId | None
    """The shared memory that this frontend's references point into."""
    transfer: str
    """``auto``, ``shm``, ``nixl`` or ``inline``: what the deployment asks for."""
    identity_seed_fingerprint: str


class Ready(msgspec.Struct, tag=True, kw_only=True):
    worker: str
    facts: WorkerFacts
    epoch: str
    """Fresh for each start of the worker process."""
    kv_address: str
    """Where this worker publishes ``KvDelta``."""
    transfer: str
    """``shm`` or ``inline``: how tensors reach this worker, until ``TransferChosen``."""
    transfer_reason: str
    nixl: bool = False
    """Whether it would take a ``NixlOffer``."""
    process: Process | None = None
    """By which a frontend on its host sees whether it lives, however it found it."""


class Refused(msgspec.Struct, tag=True, kw_only=True):
    worker: str
    reason: str


class AddRequest(msgspec.Struct, tag=True):
    """Followed by the frames of an EngineCoreRequest."""

    request_id: str
    part: Count = 0
    """Which part of it, where its input streams in. Counts up from 0."""
    prefill_tokens: Count = 0
    """Work until its first token, in prompt tokens, as the frontend that sends it charges
    it; the other frontends hear of it in ``LoadReport``."""
    blocks: Count = 0
    """KV blocks that its prompt takes, charged likewise."""


class AbortRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Calls a method of the engine. Followed by the frames of its argument list."""

    call_id: int
    method: str


class CallResult(msgspec.Struct, tag=True):
    """Followed by the frames of the result, unless it failed."""

    call_id: int
    error: str | None = None


class Outputs(msgspec.Struct, tag=True):
    """Followed by the frames of an EngineCoreOutputs."""


class Released(msgspec.Struct, tag=True):
    """The engine has let go of these aborted requests: their tensors may be reused."""

    request_ids: list[str]


class TensorsMissing(msgspec.Struct, tag=True):
    """The worker cannot read what this request refers to: send the tensors with it."""

    request_id: str
    reason: str
    part: Count = 0


class NixlOffer(msgspec.Struct, tag=True):
    """The frontend's arena can be read by NIXL. Answered by ``TransferChosen``."""

    arena: RemoteArena


class TransferChosen(msgspec.Struct, tag=True):
    """How tensors reach this worker from now on: ``nixl``, or ``inline`` when it failed.

    Also said without being asked, when NIXL fails in use and when it works again.
    """

    transfer: str
    reason: str


class Pulling(msgspec.Struct, tag=True):
    """The worker reads from the frontend's arena by NIXL: keep its agent going.

    For so many ``seconds`` at most, or until this is said again; 0 says that nothing is
    being read any more. The counts are of what has ended since it was last said.
    """

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
    pulls: Count = 0
    nbytes: Count = 0
    failures: Count = 0
    read_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How long the pulls took, added up; they may overlap."""


class EmbeddingOffer(msgspec.Struct, frozen=True, array_like=True):
    """An encoder's output as a worker on another host can read it, by NIXL."""

    arena: RemoteArena
    entry: EntryRef
    """Holds the bytes of the output's file in its host's cache."""


class ExportEmbedding(msgspec.Struct, tag=True):
    """Asks an encode worker to make an output readable for workers of other hosts.

    Answered by ``EmbeddingExported``. It stays in place until ``ReleaseEmbedding``, or for
    a bounded time.
    """

    move_id: Count
    """Chosen by the frontend that has the output moved, and never chosen again by it."""
    identifier: str


class EmbeddingExported(msgspec.Struct, tag=True):
    move_id: Count
    offer: EmbeddingOffer | None = None
    error: str = ""
    """Why there is none."""


class PullEmbedding(msgspec.Struct, tag=True):
    """Asks a worker to read an output into its host's cache. Answered by
    ``EmbeddingPulled``."""

    move_id: Count
    identifier: str
    offer: EmbeddingOffer


class EmbeddingPulled(msgspec.Struct, tag=True):
    move_id: Count
    error: str = ""
    """Why the output is not there; empty when it is."""


class ReleaseEmbedding(msgspec.Struct, tag=True):
    """What was exported under this number is not read any more."""

    move_id: Count


class AskSnapshot(msgspec.Struct, tag=True):
    """Asks for ``KvSnapshot``."""


Digest = Annotated[bytes, msgspec.Meta(min_length=1)]
"""The hash of a block, as the engine computes it."""


RESUME_POINTS = "resume points"
"""Stands where a medium does: of the blocks in ``GPU``, those behind which the engine can
go on."""


class KvSnapshot(msgspec.Struct, tag=True):
    """All blocks resident in an engine, as of delta ``seq`` of ``epoch``."""

    epoch: str
    seq: int
    blocks: dict[str, list[Digest]]
    """Medium (``GPU``, ``CPU``, ...) -> block digests."""
    to_resume_points: bool = False
    """Whether the engine takes a prompt's leading blocks up to one of ``RESUME_POINTS``
    only, because some of its cache groups keep parts of a prompt."""


class KvDelta(msgspec.Struct, tag=True):
    """Blocks that became resident or ceased to be. Published, not answered.

    Applied in this order: ``cleared``, then ``removed``, then ``stored``. Within one
    delta no digest stands in both lists of a medium.
    """

    epoch: str
    seq: int
    """Counts up by one for each delta of an epoch, from 1."""
    stored: dict[str, list[Digest]] = {}
    removed: dict[str, list[Digest]] = {}
    cleared: bool = False
    at: float = 0.0
    """When the engine's events were made, in seconds since 1970 by its host's clock; 0
    where it does not say."""
    to_resume_points: bool = False
    """As in ``KvSnapshot``."""


class FrontendShare(msgspec.Struct, frozen=True):
    """What one frontend has in flight on a worker, as that frontend charged it."""

    requests: Total = 0
    prefill_tokens: Total = 0
    """Of requests without a first token."""
    blocks: Total = 0


class LoadReport(msgspec.Struct, tag=True, kw_only=True):
    """How busy a worker is, and how far its KV deltas have come. Published.

    Comes several times a second while anything changes, and once a second otherwise. It
    travels behind the deltas on one line: whoever has not seen delta ``seq`` by now has
    lost it.
    """

    epoch: str
    seq: int
    """Of the last ``KvDelta``."""
    running: Count = 0
    """Requests that the engine is working on."""
    waiting: Count = 0
    """Requests that wait in the engine."""
    kv_blocks: Count = 0
    """KV blocks that requests in the engine hold."""
    shares: dict[str, FrontendShare] = {}
    """By the name of the frontend; only those with requests in flight."""
    encoder_resets: Count = 0
    """How often the engine was told to forget images or their encoder outputs."""
    encoder_runs: int = 0
    """Images that the engine has encoded since it was started."""
    embedding_loads: int = 0
    """Encoder outputs that it took from its host's cache instead."""
    embedding_cache: str = ""
    """Workers that say the same share one cache of encoder outputs; empty: it has none.
    What is before ``@`` names the model: where that is the same, outputs fit."""
    embeddings: list[str] | None = None
    """The identifiers in it, the most recently used last; None: not told this time."""


class Ping(msgspec.Struct, tag=True):
    """Says that the sender lives. The worker answers with ``Pong``."""


class Pong(msgspec.Struct, tag=True):
    """The answer to ``Ping``, with what was published before it on the other line."""

    epoch: str = ""
    seq: int = 0
    """Of the last ``KvDelta``; it may still be under way when this arrives."""


class Draining(msgspec.Struct, tag=True):
    """The worker is going to leave: send no new requests. Those it has it finishes.

    What is not done within ``seconds`` is left to others; ``Bye`` follows in any case.
    """

    seconds: float


class Bye(msgspec.Struct, tag=True):
    """The sender is leaving in good order."""


Message = (
    Hello
    | Ready
    | Refused
    | AddRequest
    | AbortRequests
    | Call
    | CallResult
    | Outputs
    | Released
    | TensorsMissing
    | NixlOffer
    | TransferChosen
    | Pulling
    | ExportEmbedding
    | EmbeddingExported
    | PullEmbedding
    | EmbeddingPulled
    | ReleaseEmbedding
    | AskSnapshot
    | KvSnapshot
    | KvDelta
    | LoadReport
    | Ping
    | Pong
    | Draining
    | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message, payload: Sequence[Frame] = ()) -> list[Frame]:
    """Return the frames of ``message``, ``payload`` behind it."""
    return [_encoder.encode(message), *payload]


def decode(frames: Sequence[Frame]) -> tuple[Message, Sequence[Frame]]:
    """Split frames into the message and its payload.

    Raises:
        BadMessage: the first frame is not one of ours.
    """
    if not frames:
        raise BadMessage("an empty message")
    try:
        return _decoder.decode(frames[0]), frames[1:]
    except msgspec.DecodeError as error:
        raise BadMessage(str(error)) from error
