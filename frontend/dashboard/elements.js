// Making elements, and saying numbers. Text only ever becomes text: nothing is parsed as HTML.

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A track with parts; each is [class, share of the whole from 0 to 1].
export function bar(parts, label) {
  const track = make("span", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [kind, share] of parts) {
    if (!(share > 0)) continue;
    const part = make("span", { class: kind });
    part.style.width = `${Math.min(1, share) * 100}%`; // set, not parsed: the policy allows it
    track.append(part);
  }
  return track;
}

export function share(part, whole) {
  return whole > 0 ? part / whole : 0;
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function count(number) {
  if (number === null || number === undefined) return "–";
  return Math.round(number).toLocaleString("en-US");
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

// The end of a worker's name: enough to tell it from the others, and to find it in a log.
export function shortName(name, names) {
  const others = names.filter((other) => other !== name);
  for (let start = name.length - 9; start > 3; start -= 1) {
    const end = name.slice(start);
    if (!others.some((other) => other.endsWith(end))) return `…${end.replace(/^[-:/.]+/, "")}`;
  }
  return name;
}

// Keeps the children of `list` equal to `items`: made, updated or removed by key, in order.
export function keyed(list, items, keyOf, makeOne, updateOne) {
  const known = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    known.delete(key);
    if (child === undefined) {
      child = makeOne(item);
      child.dataset.key = key;
    }
    updateOne(child, item);
    if (child === place) place = place.nextElementSibling;
    else list.insertBefore(child, place);
  }
  for (const child of known.values()) child.remove();
}
