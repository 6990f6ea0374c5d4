// The data of the page: one step, plain and planned, decoded and asked. Nothing here touches the page.
"use strict";

const KINDS = [
  "parameter",
  "optimizer",
  "gradient",
  "input",
  "activation",
  "recomputed",
  "moved",
  "temporary",
];
const KIND_WORDS = {
  parameter: "parameters",
  optimizer: "optimizer state",
  gradient: "gradients",
  input: "inputs",
  activation: "activations",
  recomputed: "recomputed in backward",
  moved: "moved, encoded or on the way",
  temporary: "temporaries",
};
const PHASES = ["forward", "backward", "run again in backward"];

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  let size = Math.abs(bytes);
  while (size >= 1024 && power < units.length - 1) {
    size /= 1024;
    power += 1;
  }
  if (size >= 999.5 && power < units.length - 1 && power > 0) {
    size /= 1024;
    power += 1;
  }
  const digits = power === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return `${bytes < 0 ? "−" : ""}${Number(size.toFixed(digits))} ${units[power]}`;
}

function secondsText(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size >= 60) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  const [scale, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
}

/** Seconds that are added to others, with their sign. */
function addedText(seconds) {
  return `${seconds < 0 ? "−" : "+"} ${secondsText(Math.abs(seconds))}`;
}

function percentText(share, digits = 1) {
  return `${share < 0 ? "−" : ""}${(100 * Math.abs(share)).toFixed(digits)} %`;
}

function signedPercent(share, digits = 1) {
  return share < 0 ? percentText(share, digits) : `+${percentText(share, digits)}`;
}

/** One step: ticks (operations that run, in order) and spans (blocks of memory, from tick to tick). */
class Step {
  constructor(data, side) {
    this.data = data;
    this.texts = data.texts;
    this.ticks = data[side].ticks;
    this.seconds = data[side].seconds;
    this.spans = data[side].spans;
    this.count = this.ticks.seconds.length;
    this.live = this.summed(
      Array.from({length: this.count}, (_, k) => k),
      () => 0,
      1,
    )[0];
    this.peakTick = this.live.indexOf((this.peakBytes = this.live.reduce((a, b) => Math.max(a, b), 0)));
  }

  label(span) {
    const [kind, module, name, form, decision] = this.data.labels[this.spans.label[span]];
    const [layer, part] = this.data.modules[module] || ["", ""];
    return {
      kind: KINDS[kind],
      module: this.texts[module],
      name: this.texts[name],
      form: this.texts[form],
      decision: this.texts[decision],
      layer,
      part,
    };
  }

  /** What runs at a tick, in words. */
  running(tick) {
    const module = this.texts[this.ticks.module[tick]] || "the model itself";
    const operation = this.texts[this.ticks.operation[tick]];
    const place = operation === "outside" ? "outside the compiled graphs" : `${operation} in ${module}`;
    return `${PHASES[this.ticks.phase[tick]]}, ${place}`;
  }

  end(tick) {
    return tick + 1 < this.count ? this.ticks.seconds[tick + 1] : this.seconds;
  }

  /** The last tick that begins at or before a moment. */
  tickAt(seconds) {
    return Math.max(0, upper(this.ticks.seconds, seconds) - 1);
  }

  /** Bytes of each group at each of some ticks (in order): `groups` rows, made by `groupOf(span)`. */
  summed(ticks, groupOf, groups) {
    const rows = Array.from({length: groups}, () => new Float64Array(ticks.length + 1));
    const {born, gone, bytes} = this.spans;
    for (let span = 0; span < born.length; span += 1) {
      const from = lower(ticks, born[span]);
      const to = lower(ticks, gone[span]);
      if (from === to) continue;
      const row = rows[groupOf(span)];
      row[from] += bytes[span];
      row[to] -= bytes[span];
    }
    return rows.map((row) => {
      let sum = 0;
      return row.subarray(0, ticks.length).map((change) => (sum += change));
    });
  }

  /** At most `columns` ticks between two moments, each the one with most memory of those around it. */
  sampled(from, to, columns) {
    const first = this.tickAt(from);
    const last = this.tickAt(to);
    if (last - first < columns) return Array.from({length: last - first + 1}, (_, k) => first + k);
    const found = [];
    const width = (to - from) / columns;
    let tick = first;
    for (let column = 0; column < columns && tick <= last; column += 1) {
      let best = -1;
      const end = from + (column + 1) * width;
      while (tick <= last && (this.ticks.seconds[tick] < end || column === columns - 1)) {
        if (best < 0 || this.live[tick] > this.live[best]) best = tick;
        tick += 1;
      }
      if (best >= 0) found.push(best);
    }
    return found;
  }

  /** Kind -> bytes at a tick. */
  kindsAt(tick) {
    const sums = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    for (const span of this.alive(tick))
      sums[KINDS[this.data.labels[this.spans.label[span]][0]]] += this.spans.bytes[span];
    return sums;
  }

  alive(tick) {
    const found = [];
    const {born, gone} = this.spans;
    for (let span = 0; span < born.length && born[span] <= tick; span += 1)
      if (gone[span] > tick) found.push(span);
    return found;
  }

  /** What is in memory at a tick, alike blocks of several layers together, the largest first. */
  holders(tick) {
    const groups = new Map();
    for (const span of this.alive(tick)) {
      const about = this.label(span);
      const key = [about.kind, about.part, about.name, about.form, about.decision].join("\u0000");
      if (!groups.has(key)) groups.set(key, {...about, bytes: 0, count: 0, modules: new Set()});
      const group = groups.get(key);
      group.bytes += this.spans.bytes[span];
      group.count += 1;
      group.modules.add(about.module);
    }
    const found = [...groups.values()].sort((a, b) => b.bytes - a.bytes);
    for (const group of found) group.where = folded([...group.modules]);
    return found;
  }
}

/** Names of members of lists, and of lists within lists, become one: stages.0-1.blocks.0-5.mlp. */
function folded(modules) {
  const groups = new Map();
  for (const module of modules) {
    const numbers = [];
    const kind = module.replace(/(^|\.)(\d+)(?=\.|$)/g, (found, dot, number, at) => {
      // a last number counts only where it is the only one: mlp.0 and mlp.2 of a layer are two things
      if (numbers.length && at + found.length === module.length) return found;
      numbers.push(Number(number));
      return `${dot}#`;
    });
    if (!groups.has(kind)) groups.set(kind, numbers.map(() => new Set()));
    numbers.forEach((number, k) => groups.get(kind)[k].add(number));
  }
  const names = [...groups].map(([kind, lists]) =>
    lists.reduce((name, list) => name.replace("#", ranges(list)), kind),
  );
  const shown = names.filter(Boolean).slice(0, 3).join(", ");
  return names.length > 3 ? `${shown} and ${names.length - 3} more` : shown;
}

function ranges(numbers) {
  const parts = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = parts[parts.length - 1];
    if (last && n === last[1] + 1) last[1] = n;
    else parts.push([n, n]);
  }
  const texts = parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`));
  return texts.length > 6 ? `${texts.slice(0, 5).join(",")},…${texts[texts.length - 1]}` : texts.join(",");
}

/** How many of a sorted list are below, or not above, a number. */
function lower(list, number) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < number) low = middle + 1;
    else high = middle;
  }
  return low;
}

function upper(list, number) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= number) low = middle + 1;
    else high = middle;
  }
  return low;
}
