// The list of the last requests, and for each the answer to "why this worker?".

import { ago, bar, count, duration, keyed, make, share, shortName } from "./elements.js";

const ENDS = {
  running: "running", stop: "done", length: "done, full length", abort: "aborted",
  error: "failed", lost: "lost with its worker", repetition: "stopped: repeats itself",
};

// The last requests of all frontends, the newest first.
export function joinRequests(frontends) {
  const all = [];
  for (const frontend of frontends) {
    for (const request of frontend.log) {
      all.push({ ...request, frontend: frontend.frontend, age: frontend.now - request.arrived });
    }
  }
  return all.sort((a, b) => a.age - b.age);
}

function promptBar(request) {
  const whole = request.prompt_tokens;
  const known = request.cached_tokens !== null;
  const cached = known ? request.cached_tokens : request.overlap_tokens;
  const missed = known ? Math.max(0, request.overlap_tokens - cached) : 0;
  const promised = known ? 0 : Math.min(request.promised_tokens, whole - cached);
  const label = known
    ? `${count(cached)} of ${count(whole)} prompt tokens were taken from the cache; ` +
      `${count(request.overlap_tokens)} were expected`
    : `${count(cached)} of ${count(whole)} prompt tokens are expected in the cache`;
  return bar(
    [
      [known ? "cached" : "expected", share(cached, whole)],
      ["missed", share(missed, whole)],
      ["promised", share(promised, whole)],
    ],
    label,
  );
}

function items(request) {
  if (!request.items) return "";
  return request.items === 1 ? "1 picture" : `${request.items} pictures`;
}

function cells(request, names) {
  const title = [request.id, request.adapter && `adapter ${request.adapter}`];
  return [
    make("span", { class: "when" }),
    make(
      "span", { class: "what" },
      make("code", { text: request.id, title: title.filter(Boolean).join(", ") }),
      make("small", { text: [request.adapter, items(request)].filter(Boolean).join(" · ") }),
    ),
    make(
      "span", { class: "who" },
      make("span", { text: shortName(request.worker, names), title: request.worker }),
      make("small", { text: request.transfer === "none" ? "no pictures" : `by ${request.transfer}` }),
    ),
    make(
      "span", { class: "prompt" },
      promptBar(request),
      make("small", {
        text: `${count(request.cached_tokens ?? request.overlap_tokens)} of ` +
          `${count(request.prompt_tokens)} tokens`,
      }),
    ),
    make("span", { class: "first", text: duration(request.first_token_seconds) }),
    make("span", {
      class: `outcome ${request.outcome in ENDS ? request.outcome : "error"}`,
      text: (ENDS[request.outcome] ?? request.outcome) + (request.moves ? ", moved" : ""),
    }),
  ];
}

function candidateRow(candidate, highest, request, names, chosen) {
  const from = [];
  if (candidate.overlap_tokens) from.push(`holds ${count(candidate.overlap_tokens)} tokens`);
  if (candidate.promised_tokens) from.push(`promised ${count(candidate.promised_tokens)}`);
  if (candidate.image_tokens) from.push(`must encode ${count(candidate.image_tokens)}`);
  return make(
    "tr", { class: chosen ? "chosen" : null },
    make("th", { scope: "row", title: candidate.worker },
      make("span", { text: shortName(candidate.worker, names) }),
      chosen ? make("em", { text: "chosen" }) : null),
    make("td", { class: "cost" },
      bar([["price", share(candidate.cost, highest)]], `cost ${count(candidate.cost)}`),
      make("span", { text: count(candidate.cost) })),
    make("td", { class: "reason", text: from.join(", ") || "holds nothing of it" }),
  );
}

function why(request, names) {
  const chosen = { ...request, image_tokens: 0 };
  const all = [chosen, ...request.alternatives];
  const highest = Math.max(...all.map((candidate) => candidate.cost), 1e-9);
  const table = make(
    "table", {},
    make("caption", {}, make("strong", { text: "Why this worker? " }),
      "What each would have cost, in tokens of prefill: the lowest wins."),
    make("tbody", {}, ...all.map(
      (each) => candidateRow(each, highest, request, names, each === chosen))),
  );
  const facts = [
    `decided in ${duration(request.decision_seconds)}`,
    request.seconds !== null && `took ${duration(request.seconds)}`,
    request.moves && `sent anew ${request.moves} times`,
    `frontend ${request.frontend}`,
  ];
  return [
    make("div", { class: "pictures" }),
    table,
    make("p", { class: "facts", text: facts.filter(Boolean).join(" · ") }),
  ];
}

async function showPictures(box, request, fetchPicture) {
  for (let index = 0; index < request.pictures; index += 1) {
    const picture = await fetchPicture(request, index);
    if (picture === null) continue;
    const url = URL.createObjectURL(picture);
    const image = make("img", { src: url, alt: `Picture ${index + 1} of the request` });
    image.addEventListener("load", () => URL.revokeObjectURL(url));
    box.append(image);
  }
}

function makeRequest() {
  return make("li", { class: "request" },
    make("details", {}, make("summary", { class: "row" }), make("div", { class: "why" })));
}

function update(row, request, names, fetchPicture) {
  const { frontend, number } = request;
  const text = JSON.stringify([{ ...request, age: 0 }, names, frontend, number]);
  const details = row.firstElementChild;
  const [summary, answer] = details.children;
  if (row.shown !== text) {
    row.shown = text;
    summary.replaceChildren(...cells(request, names));
    const fillAnswer = () => {
      const before = answer.querySelector(".pictures");
      answer.replaceChildren(...why(request, names));
      if (before?.hasChildNodes()) answer.firstElementChild.replaceWith(before);
      else showPictures(answer.firstElementChild, request, fetchPicture);
    };
    details.ontoggle = () => { if (details.open) fillAnswer(); };
    if (details.open) fillAnswer();
  }
  const when = summary.firstElementChild;
  when.textContent = ago(request.age);
  when.title = new Date(request.arrived * 1000).toLocaleString();
}

export function showRequests(list, requests, names, fetchPicture) {
  keyed(
    list, requests,
    (request) => `${request.frontend}/${request.number}/${request.arrived}`,
    makeRequest,
    (row, request) => update(row, request, names, fetchPicture),
  );
}
