// The charts, drawn by uPlot: memory over time, what other budgets would cost, what was measured.
"use strict";

const MANY = 900;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Which group of the stack each span belongs to: one a kind, and for activations one a layer or part. */
class Groups {
  constructor(steps, by) {
    const found = new Map();
    const sizes = new Map();
    for (const step of steps) {
      step.spans.label.forEach((label, span) => {
        const about = step.label(span);
        const inside = by === "none" ? "" : about[by] || "the model itself";
        const key = about.kind === "activation" ? `activation\u0000${inside}` : about.kind;
        if (!found.has(key))
          found.set(key, {kind: about.kind, inside: about.kind === "activation" ? inside : ""});
        sizes.set(key, (sizes.get(key) || 0) + step.spans.bytes[span]);
      });
    }
    const most =
      by === "part"
        ? [...sizes]
            .filter(([key]) => key.startsWith("activation\u0000"))
            .sort((a, b) => b[1] - a[1])
            .slice(0, 9)
            .map(([key]) => key)
        : null;
    const rest = `activation\u0000other parts`;
    this.keys = [...found.keys()].filter(
      (key) => !most || !key.startsWith("activation\u0000") || most.includes(key),
    );
    if (most && this.keys.length < found.size) {
      this.keys.push(rest);
      found.set(rest, {kind: "activation", inside: "other parts"});
    }
    // the order of the forward within a kind: layers that were saved first lie below
    this.keys.sort((a, b) => KINDS.indexOf(found.get(a).kind) - KINDS.indexOf(found.get(b).kind));
    this.list = this.keys.map((key) => found.get(key));
    this.place = new Map(this.keys.map((key, k) => [key, k]));
    this.rest = this.place.get(rest);
    this.by = by;
    const inner = this.list.filter((group) => group.kind === "activation");
    inner.forEach((group, k) => {
      group.share = inner.length > 1 ? k / (inner.length - 1) : 0;
      group.odd = k % 2;
    });
    this.inner = inner.length;
    this.of = steps.map((step) => step.data.labels.map((_, label) => this.ofLabel(step, label)));
  }

  ofLabel(step, label) {
    const [kind, module] = step.data.labels[label];
    const [layer, part] = step.data.modules[module] || ["", ""];
    if (KINDS[kind] !== "activation") return this.place.get(KINDS[kind]);
    const inside = this.by === "none" ? "" : (this.by === "layer" ? layer : part) || "the model itself";
    return this.place.get(`activation\u0000${inside}`) ?? this.rest;
  }

  color(group) {
    if (group.kind !== "activation" || this.inner < 2) return color(group.kind);
    const light = color(group.odd ? "hue-light" : "hue-dark");
    const [from, to] = this.by === "part" ? [95, 235] : [128, 205];
    return `hsl(${Math.round(from + (to - from) * group.share)} 52% ${light})`;
  }

  words(group) {
    return group.inside ? `activations of ${group.inside}` : KIND_WORDS[group.kind];
  }
}

/**
 * The step's memory, stacked. `shared` is what both charts have in common: its `tell` hears where the cursor
 * is, its `zoom` draws both anew.
 */
class StackChart {
  constructor(place, step, name, shared) {
    Object.assign(this, {place, step, name, shared});
    this.column = 0;
    place.className = "chart";
    place.replaceChildren(
      element(
        "h3",
        {},
        name,
        " ",
        element("span", {}, `${bytesText(step.peakBytes)} at the peak, ${secondsText(step.seconds)}`),
      ),
    );
    this.slider = element("div", {
      role: "slider",
      tabindex: "0",
      "aria-label": `${name}: moment`,
      "aria-valuemin": "0",
      "aria-valuemax": String(step.count - 1),
      "aria-keyshortcuts": "ArrowLeft ArrowRight P + - 0",
    });
    place.append(this.slider);
    this.slider.addEventListener("keydown", (event) => this.pressed(event));
    this.slider.addEventListener("focus", () => this.at(this.column));
    this.value(step.peakTick);
  }

  draw(from, to, groups, highest) {
    const width = Math.max(220, this.place.clientWidth - 14);
    const tick = this.ticks ? this.ticks[this.column] : this.step.peakTick;
    this.range = [from, to];
    this.ticks = this.step.sampled(from, to, Math.min(MANY, width));
    const which = groups.of[this.shared.steps.indexOf(this.step)];
    const rows = this.step.summed(
      this.ticks,
      (span) => which[this.step.spans.label[span]],
      groups.list.length,
    );
    const times = this.ticks.map((tick) => Math.max(from, this.step.ticks.seconds[tick]));
    // one more point, so that the last operation has its width
    const end = Math.min(
      to,
      Math.max(this.step.end(this.ticks[this.ticks.length - 1]), times[times.length - 1]),
    );
    let below = new Float64Array(this.ticks.length);
    const stacked = rows.map((row) => (below = row.map((bytes, k) => bytes + below[k])));
    const series = stacked
      .map((row, k) => ({
        fill: groups.color(groups.list[k]),
        width: 0,
        points: {show: false},
        paths: uPlot.paths.stepped({align: 1}),
        values: row,
      }))
      .reverse();
    const data = [[...times, end], ...series.map(({values}) => [...values, values[values.length - 1]])];
    this.plot?.destroy();
    this.plot = new uPlot(
      {
        width,
        height: this.shared.height(),
        legend: {show: false},
        padding: [14, 10, 0, 0],
        drawOrder: ["series", "axes"],
        cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false}},
        scales: {x: {time: false, range: () => [from, to]}, y: {range: () => [0, highest * 1.04]}},
        axes: axes(secondsText, bytesText),
        series: [{}, ...series.map(({values, ...about}) => about)],
        hooks: {
          draw: [(plot) => this.marks(plot)],
          setCursor: [
            (plot) => {
              if (plot.cursor.left >= 0) this.hovered(plot);
            },
          ],
          setSelect: [(plot) => this.selected(plot)],
        },
      },
      data,
      this.slider,
    );
    this.column = Math.max(0, upper(this.ticks, tick) - 1);
    touched(this.plot);
  }

  /** The budget's line, and a ring around the peak. */
  marks(plot) {
    const {ctx, bbox} = plot;
    const ratio = devicePixelRatio || 1;
    const budget = this.shared.budget;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = 2 * ratio;
    ctx.strokeStyle = ctx.fillStyle = color("text");
    if (budget) {
      const y = plot.valToPos(budget, "y", true);
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      const place = [`budget ${bytesText(budget)}`, bbox.left + 6 * ratio, y - 5 * ratio];
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = color("card");
      ctx.strokeText(...place);
      ctx.fillText(...place);
      ctx.lineWidth = 2 * ratio;
      ctx.strokeStyle = color("text");
    }
    if (this.step.seconds <= this.range[0]) {
      ctx.fillStyle = color("quiet");
      ctx.fillText("this step is over by then", bbox.left + 6 * ratio, bbox.top + bbox.height - 8 * ratio);
    }
    const {peakTick, peakBytes} = this.step;
    const x = plot.valToPos((this.step.ticks.seconds[peakTick] + this.step.end(peakTick)) / 2, "x", true);
    ctx.beginPath();
    ctx.arc(x, plot.valToPos(peakBytes, "y", true), 5 * ratio, 0, 2 * Math.PI);
    ctx.fillStyle = color("card");
    ctx.fill();
    ctx.stroke();
    ctx.restore();
  }

  hovered(plot) {
    const when = plot.posToVal(plot.cursor.left, "x");
    const times = plot.data[0];
    this.column = Math.min(Math.max(0, upper(times, when) - 1), this.ticks.length - 1);
    this.value(this.ticks[this.column]);
    this.shared.tell(this.step, this.ticks[this.column], this.name);
  }

  selected(plot) {
    if (plot.select.width < 8) return;
    const from = plot.posToVal(plot.select.left, "x");
    const to = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    this.shared.zoom(from, to);
  }

  value(tick) {
    const words =
      `${secondsText(this.step.ticks.seconds[tick])}, ${this.step.running(tick)}: ` +
      bytesText(this.step.live[tick]);
    this.slider.setAttribute("aria-valuenow", String(tick));
    this.slider.setAttribute("aria-valuetext", words);
  }

  /** Put the cursor at a column. */
  at(column) {
    this.column = Math.min(Math.max(0, column), this.ticks.length - 1);
    const tick = this.ticks[this.column];
    const middle =
      (Math.max(this.step.ticks.seconds[tick], this.range[0]) + this.plot.data[0][this.column + 1]) / 2;
    const {plot} = this;
    // a chart that was just made knows its scales when what it has queued itself is done
    queueMicrotask(() => {
      if (plot === this.plot) plot.setCursor({left: plot.valToPos(middle, "x"), top: 20}, false);
    });
    this.value(tick);
    this.shared.tell(this.step, tick, this.name);
  }

  toPeak() {
    const {peakTick} = this.step;
    if (this.ticks.indexOf(peakTick) < 0) this.shared.zoom(0, this.shared.whole);
    this.at(Math.max(0, this.ticks.indexOf(peakTick)));
  }

  pressed(event) {
    const far = Math.max(1, Math.round(this.ticks.length / 20));
    const actions = {
      ArrowLeft: () => this.at(this.column - 1),
      ArrowRight: () => this.at(this.column + 1),
      ArrowDown: () => this.at(this.column - 1),
      ArrowUp: () => this.at(this.column + 1),
      PageDown: () => this.at(this.column - far),
      PageUp: () => this.at(this.column + far),
      Home: () => this.at(0),
      End: () => this.at(this.ticks.length - 1),
      p: () => this.toPeak(),
      P: () => this.toPeak(),
      0: () => this.shared.zoom(0, this.shared.whole),
      "+": () => this.shared.closer(this.moment(), 0.5),
      "-": () => this.shared.closer(this.moment(), 2),
    };
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  moment() {
    return this.step.ticks.seconds[this.ticks[this.column]];
  }
}

/** A finger that moves over a chart moves its cursor. */
function touched(plot) {
  const follow = (event) => {
    const box = plot.over.getBoundingClientRect();
    plot.setCursor({left: event.touches[0].clientX - box.left, top: event.touches[0].clientY - box.top});
  };
  plot.over.addEventListener("touchstart", follow, {passive: true});
  plot.over.addEventListener("touchmove", follow, {passive: true});
}

function axes(across, up, labels = []) {
  const look = {
    stroke: color("quiet"),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 18,
  };
  const grid = {stroke: color("grid"), width: 1};
  const ticks = {stroke: color("grid"), width: 1, size: 5};
  const powers = Array.from({length: 50}, (_, k) => 2 ** k);
  const bytes = (text) => (text === bytesText ? {incrs: powers} : {});
  return [
    {
      ...look,
      grid: {show: false},
      ticks,
      space: 70,
      size: 34,
      values: (_, at) => at.map(across),
      label: labels[0],
      ...bytes(across),
    },
    {
      ...look,
      grid,
      ticks,
      size: 66,
      space: 38,
      values: (_, at) => at.map(up),
      label: labels[1],
      ...bytes(up),
    },
  ];
}

/** A chart that is a picture to the keyboard: its table stands beside it. */
function picture(place, label, options, data) {
  place.className = "chart";
  const inside = element("div", {role: "img", "aria-label": label});
  place.replaceChildren(inside);
  const width = Math.max(220, place.clientWidth - 14);
  return new uPlot(
    {
      width,
      height: Math.min(340, Math.max(230, width * 0.45)),
      legend: {show: false},
      padding: [14, 16, 0, 0],
      cursor: {show: false},
      ...options,
    },
    data,
    inside,
  );
}

function budgetsChart(place, data) {
  const {points, summary} = data;
  const plain = summary.plain_seconds || 1;
  const chosen = [summary.predicted_peak_bytes, summary.predicted_extra_seconds / plain];
  const xs = [...new Set([...points.map((point) => point.peak_bytes), chosen[0]])].sort((a, b) => a - b);
  const column = (pairs) => {
    const at = new Map(pairs);
    return xs.map((x) => at.get(x) ?? null);
  };
  const found = column(points.map((point) => [point.peak_bytes, point.extra_seconds / plain]));
  const bound = column(points.map((point) => [point.peak_bytes, point.bound_seconds / plain]));
  const high = Math.max(...found, chosen[1], 0.01) * 1.12;
  const range = [
    Math.max(0, xs[0] - 0.06 * (xs[xs.length - 1] - xs[0])),
    xs[xs.length - 1] + 0.04 * (xs[xs.length - 1] - xs[0] || 1),
  ];
  const dots = (name, size) => ({
    show: true,
    size,
    fill: color(name),
    stroke: color("card"),
    width: 2,
    space: 0,
  });
  return picture(
    place,
    `Extra time against peak: ${points.length} plans, the bound, and the plan of this page`,
    {
      scales: {x: {time: false, range: () => range}, y: {range: () => [-0.03 * high, high]}},
      axes: axes(bytesText, (share) => percentText(share, high < 0.1 ? 1 : 0), [
        "peak of the step",
        "extra time",
      ]),
      series: [
        {},
        {stroke: color("quiet"), width: 2, dash: [5, 4], spanGaps: true, points: {show: false}},
        {stroke: color("activation"), width: 2.5, spanGaps: true, points: dots("activation", 12)},
        {stroke: "transparent", points: dots("temporary", 17)},
      ],
    },
    [xs, bound, found, column([chosen])],
  );
}

function measuredChart(place, data, curves) {
  const times = [...new Set(curves.flatMap((curve) => curve.moments.map(([when]) => when)))].sort(
    (a, b) => a - b,
  );
  const rows = curves.map((curve) => {
    const at = new Map(curve.moments);
    return times.map((when) => at.get(when) ?? null);
  });
  return picture(
    place,
    `Live memory over time: ${curves.map((curve) => curve.name).join(", ")}`,
    {
      scales: {
        x: {time: false, range: () => [0, times[times.length - 1]]},
        y: {range: (_, __, most) => [0, most * 1.06]},
      },
      axes: axes(secondsText, bytesText),
      series: [
        {},
        ...curves.map((curve) => ({
          stroke: color(curve.color),
          width: 1.6,
          dash: curve.dash,
          spanGaps: true,
          points: {show: false},
          paths: uPlot.paths.stepped({align: 1}),
        })),
      ],
    },
    [times, ...rows],
  );
}
