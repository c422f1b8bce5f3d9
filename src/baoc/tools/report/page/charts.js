// The frontier and the curves of a run.

const PAD = { left: 58, right: 16, top: 14, bottom: 40 };

function axes(root, x, y, xTicks, yTicks, width, height, names) {
  for (const tick of yTicks) {
    root.append(shape("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(tick), y2: y(tick) }));
    root.append(shape("text", { x: PAD.left - 8, y: y(tick) + 4, "text-anchor": "end" }, names.y(tick)));
  }
  for (const tick of xTicks) {
    root.append(shape("text", { x: x(tick), y: height - PAD.bottom + 18, "text-anchor": "middle" }, names.x(tick)));
  }
  root.append(shape("text", { x: width - PAD.right, y: height - 4, "text-anchor": "end" }, names.below));
}

const polyline = (points) => points.map(([a, b], index) => `${index ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");

/** Labels at points, moved up or down until they do not overlap. */
function labels(root, wanted, width) {
  const placed = [];
  for (const { x, y, text } of wanted) {
    const long = text.length * 6.6;
    const anchor = x + long + 14 > width ? "end" : "start";
    const left = anchor === "end" ? x - long - 10 : x + 10;
    let at = y - 9;
    while (placed.some(([l, r, b]) => left < r && left + long > l && Math.abs(at - b) < 14)) at -= 15;
    placed.push([left, left + long, at]);
    root.append(shape("text", { class: "strong", x: anchor === "end" ? x - 10 : x + 10, y: at, "text-anchor": anchor }, text));
  }
}

class FrontierChart {
  constructor(box, onPick) {
    this.box = box;
    this.onPick = onPick;
    this.at = 0;
    whenSized(box, (width) => this.draw(width));
  }

  show(index) {
    this.at = index;
    if (this.ring) this.place();
  }

  draw(width) {
    const height = 330;
    const plans = data.frontier;
    const others = data.plans.filter((plan) => plan.loss !== null || !isLoss);
    const sizes = [...plans, ...others].map((plan) => plan.bytes);
    const risks = [...plans, ...others].map((plan) => plan.risk).concat(isLoss ? [0] : []);
    const [low, high] = [Math.min(...risks), Math.max(...risks)];
    const margin = 0.08 * (high - low || 1);
    const x = logarithmic([Math.min(...sizes), Math.max(...sizes, data.reference_bytes)], [PAD.left + 8, width - PAD.right - 8]);
    const y = linear([low - margin, high + margin], [height - PAD.bottom, PAD.top]);
    const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.words() });
    axes(root, x, y, powersOfTwo(Math.min(...sizes), Math.max(...sizes), width / 90), ticks(low - margin, high + margin, 6), width, height, {
      x: bytes, y: (tick) => (isLoss ? `${signed(tick, Math.abs(high - low) < 2 ? 1 : 0)}%` : tick.toPrecision(2)), below: "optimizer state",
    });
    if (isLoss) {
      root.append(shape("line", { class: "mark", x1: PAD.left, x2: width - PAD.right, y1: y(0), y2: y(0) }));
      root.append(shape("text", { x: PAD.left + 6, y: y(0) + (high > 0.02 ? 15 : -5) }, "AdamW32"));
    }
    root.append(shape("line", { class: "mark", x1: x(data.reference_bytes), x2: x(data.reference_bytes), y1: PAD.top, y2: height - PAD.bottom }));
    root.append(shape("text", { x: x(data.reference_bytes) - 5, y: PAD.top + 8, "text-anchor": "end" }, "AdamW16's state"));
    const points = plans.map((plan) => [x(plan.bytes), y(plan.risk)]);
    const floor = height - PAD.bottom;
    root.append(shape("path", { class: "area", d: `${polyline(points)}L${points.at(-1)[0]},${floor}L${points[0][0]},${floor}Z` }));
    root.append(shape("path", { class: "curve", d: polyline(points) }));
    points.forEach(([a, b]) => root.append(shape("circle", { class: "dot", cx: a, cy: b, r: 3.2 })));
    const named = [[data.knee, "knee"], [data.auto, "auto"]].filter(([index]) => index !== null);
    const joined = new Map();
    for (const [index, text] of named) joined.set(index, joined.has(index) ? `${joined.get(index)}, ${text}` : text);
    const wanted = [...joined].map(([index, text]) => ({ x: points[index][0], y: points[index][1], text }));
    for (const { x: a, y: b } of wanted) {
      root.append(shape("path", { class: "dot named", d: `M${a},${b - 7}L${a + 7},${b}L${a},${b + 7}L${a - 7},${b}Z` }));
    }
    for (const plan of others) {
      const [a, b] = [x(plan.bytes), y(plan.risk)];
      root.append(shape("rect", { class: "dot named", x: a - 5, y: b - 5, width: 10, height: 10 }));
      if (width > 480) wanted.push({ x: a, y: b, text: plan.name });
    }
    labels(root, wanted, width);
    this.points = points;
    this.ring = shape("circle", { class: "here", r: 8 });
    root.append(this.ring);
    this.place();
    const pick = (event) => {
      const scale = width / root.getBoundingClientRect().width;
      const at = (event.clientX - root.getBoundingClientRect().left) * scale;
      let best = 0;
      points.forEach(([a], index) => { if (Math.abs(a - at) < Math.abs(points[best][0] - at)) best = index; });
      this.onPick(best);
    };
    root.addEventListener("pointerdown", (event) => { root.setPointerCapture(event.pointerId); pick(event); });
    root.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });
    root.style.cursor = "pointer";
    root.style.touchAction = "pan-y";
    this.box.replaceChildren(root);
  }

  words() {
    const knee = data.knee === null ? "" : ` The knee is at ${bytes(data.frontier[data.knee].bytes)}.`;
    return `${isLoss ? "Expected loss" : "Risk"} over optimizer state, ${data.frontier.length} plans. The slider moves along it.${knee}`;
  }

  place() {
    const [a, b] = this.points[this.at];
    this.ring.setAttribute("cx", a);
    this.ring.setAttribute("cy", b);
  }
}

/** Curves over the steps of a run, with its phases, its plans and a cursor. */
class RunChart {
  constructor(box, height, lines, names, onMove, fromZero = false) {
    Object.assign(this, { box, height, lines, names, onMove, fromZero });
    whenSized(box, (width) => this.draw(width));
  }

  draw(width) {
    const { height, lines, names } = this;
    const run = data.run;
    const first = run.phases[0][0];
    const values = lines.flatMap(({ points }) => points.map(([, value]) => value)).sort((a, b) => a - b);
    const cut = values[Math.floor(0.998 * (values.length - 1))] ?? 1; // one spike must not flatten all the rest
    const low = this.fromZero ? 0 : values[0] ?? 0;
    const high = this.fromZero ? values.at(-1) : cut;
    const margin = 0.06 * (high - low || high || 1);
    const x = linear([first, run.last_step], [PAD.left, width - PAD.right]);
    const y = linear([this.fromZero ? 0 : low - margin, high + margin], [height - PAD.bottom, PAD.top]);
    const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": names.words });
    run.phases.forEach(([start, phase], index) => {
      const end = index + 1 < run.phases.length ? run.phases[index + 1][0] : run.last_step;
      if (phase !== "training") {
        root.append(shape("rect", { class: "band", x: x(start), y: PAD.top, width: Math.max(0, x(end) - x(start)), height: height - PAD.top - PAD.bottom }));
        if (x(end) - x(start) > 54) root.append(shape("text", { x: x(start) + 6, y: height - PAD.bottom - 7 }, phase));
      }
    });
    axes(root, x, y, ticks(first, run.last_step, width / 110), names.ticks(low, high + margin, height / 60), width, height, {
      x: (tick) => String(tick), y: names.y, below: "step",
    });
    run.plan_steps.slice(1).forEach((step) => {
      root.append(shape("line", { class: "mark", x1: x(step), x2: x(step), y1: PAD.top, y2: height - PAD.bottom }));
      root.append(shape("text", { x: x(step), y: PAD.top - 4, "text-anchor": "middle" }, "new plan"));
    });
    const clip = `clip-${names.id}`;
    root.append(shape("clipPath", { id: clip }, shape("rect", { x: PAD.left, y: PAD.top - 6, width: width - PAD.left - PAD.right, height: height - PAD.bottom - PAD.top + 6 })));
    for (const { points, kind, isStairs } of lines) {
      const steps = isStairs ? stairs(points, run.last_step) : points;
      const drawn = steps.map(([step, value]) => [x(step), y(value)]);
      if (isStairs) {
        const floor = height - PAD.bottom;
        root.append(shape("path", { class: "area", d: `${polyline(drawn)}L${drawn.at(-1)[0]},${floor}L${drawn[0][0]},${floor}Z` }));
      }
      root.append(shape("path", { class: `curve ${kind}`, d: polyline(drawn), "clip-path": `url(#${clip})` }));
    }
    this.cursor = shape("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, visibility: "hidden" });
    root.append(this.cursor);
    this.x = x;
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      const share = ((event.clientX - box.left) * (width / box.width) - PAD.left) / (width - PAD.left - PAD.right);
      this.onMove(Math.round(first + share * (run.last_step - first)));
    });
    root.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: 10, PageUp: -10 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.onMove((this.at ?? first) + step * Math.max(1, Math.round((run.last_step - first) / 200)));
    });
    this.box.replaceChildren(root);
  }

  point(step) {
    this.at = step;
    if (!this.cursor) return;
    this.cursor.setAttribute("visibility", "visible");
    this.cursor.setAttribute("x1", this.x(step));
    this.cursor.setAttribute("x2", this.x(step));
  }
}

function stairs(points, last) {
  const found = [];
  points.forEach(([step, value], index) => {
    if (index) found.push([step, points[index - 1][1]]);
    found.push([step, value]);
  });
  found.push([last, points.at(-1)[1]]);
  return found;
}
