// The cards of the workers.

import { bar, count, keyed, make, percent, share } from "./elements.js";

// One entry for each worker, whichever frontends know it.
export function joinWorkers(frontends) {
  const workers = new Map();
  for (const frontend of frontends) {
    for (const seen of frontend.workers) {
      const known = workers.get(seen.id);
      if (known === undefined) {
        workers.set(seen.id, {
          ...seen,
          reuse: { ...seen.reuse },
          load: { ...seen.load },
          paths: new Set(seen.transfer ? [seen.transfer] : []),
        });
        continue;
      }
      // Every frontend counts all that is in flight; the latest to hear of it says most.
      for (const name of Object.keys(known.load)) {
        known.load[name] = Math.max(known.load[name], seen.load[name]);
      }
      for (const name of Object.keys(known.reuse)) known.reuse[name] += seen.reuse[name];
      if (seen.transfer) known.paths.add(seen.transfer);
      known.ready = known.ready && seen.ready;
      known.draining = known.draining || seen.draining;
      known.refused = known.refused || seen.refused;
      known.kv_behind = Math.max(known.kv_behind, seen.kv_behind);
    }
  }
  return [...workers.values()].sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
}

function stateOf(worker) {
  if (worker.refused) return ["refused", "refused"];
  if (!worker.ready) return ["absent", "not ready"];
  if (worker.draining) return ["absent", "leaving"];
  if (!worker.kv_caught_up) return ["behind", "index catching up"];
  return ["ready", worker.load.requests ? "busy" : "idle"];
}

function fact(term, value) {
  return make("div", {}, make("dt", { text: term }), make("dd", { text: value }));
}

function meter(term, value, parts, label) {
  return make(
    "div", { class: "meter" },
    make("dt", { text: term }), make("dd", { text: value }), bar(parts, label),
  );
}

function fill(card, worker) {
  const [state, words] = stateOf(worker);
  const { load, reuse } = worker;
  const blocks = Math.max(load.blocks, load.engine_blocks);
  const size = worker.facts.num_kv_blocks || 0;
  const cached = share(reuse.cached_tokens, reuse.prompt_tokens);
  const missed = share(Math.max(0, reuse.overlap_tokens - reuse.cached_tokens), reuse.prompt_tokens);
  const paths = [...worker.paths].sort().join(", ") || "–";
  card.dataset.state = state;
  card.replaceChildren(
    make(
      "div", { class: "head" },
      make("h3", { text: worker.id, title: worker.address }),
      make("span", { class: "state", text: words }),
    ),
    ...(worker.refused ? [make("p", { class: "reason", text: worker.refused })] : []),
    make(
      "dl", {},
      meter(
        "Taken from cache", percent(reuse.cached_tokens, reuse.prompt_tokens),
        [["cached", cached], ["missed", missed]],
        `${count(reuse.cached_tokens)} of ${count(reuse.prompt_tokens)} prompt tokens of the ` +
          `last ${count(reuse.requests)} requests`,
      ),
      meter(
        "KV blocks held", `${count(blocks)} of ${count(size)}`,
        [["held", share(blocks, size)]], "KV blocks that requests in flight hold",
      ),
      fact("In flight", count(load.requests)),
      fact("Prefill queued", `${count(load.prefill_tokens)} tokens`),
      make(
        "div", {},
        make("dt", { text: "Pictures by" }),
        make("dd", {}, make("span", { class: `path ${paths}`, text: paths,
          title: worker.transfer_reason || "" })),
      ),
      fact("Index behind", worker.kv_behind ? `${count(worker.kv_behind)} deltas` : "no"),
    ),
  );
}

export function showWorkers(list, workers) {
  keyed(
    list, workers, (worker) => worker.id,
    () => make("li", { class: "worker" }),
    (card, worker) => {
      const text = JSON.stringify([worker, [...worker.paths]]);
      if (card.shown !== text) fill(card, worker);
      card.shown = text;
    },
  );
}
