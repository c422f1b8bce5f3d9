// The model as a mosaic: layers in forward order with their tensors; area by parameters, color by configuration.

const NARROW = 560;
const elements = data.tensors.reduce((sum, tensor) => sum + tensor.numel, 0);
const inLayers = data.layers.map((_, layer) => data.tensors.map((tensor, index) => [tensor, index]).filter(([tensor]) => tensor.layer === layer));

/** Proportional lengths that sum to `room`, each at least `least` unless the small ones would take too much. */
function shares(sizes, room, least) {
  const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
  const few = sizes.filter((size) => (size / total) * room < least).length;
  const floor = Math.min(least, (room * (few === sizes.length ? 1 : 0.15)) / Math.max(1, few));
  const small = sizes.map((size) => (size / total) * room < floor);
  const left = room - floor * small.filter(Boolean).length;
  const large = sizes.reduce((sum, size, index) => sum + (small[index] ? 0 : size), 0) || 1;
  return sizes.map((size, index) => (small[index] ? floor : (size / large) * left));
}

const shorten = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);

const lastPart = (name) => name.split(".").slice(-1)[0];

/** The name of a tensor within its layer; with the layer's name if the layer has no number. */
function within(tensor) {
  const layer = data.layers[tensor.layer];
  const rest = tensor.name.slice(layer.length).replace(/^\./, "");
  return /^\d+$/.test(lastPart(layer)) && rest ? rest : [lastPart(layer), rest].filter(Boolean).join(".");
}

const GUTTER = 92;
const alike = (layer) => layer.map(([tensor]) => within(tensor)).join();
/** The first of the largest group of layers with the same tensors; -1 if no two are alike. */
const repeated = (() => {
  const counts = inLayers.map((layer) => inLayers.filter((other) => alike(other) === alike(layer)).length);
  const most = Math.max(0, ...counts);
  return most > 1 ? counts.indexOf(most) : -1;
})();

/** The room for names of rows beside the mosaic, if columns are too narrow for names inside. */
function gutterFor(width) {
  return repeated >= 0 && width / data.layers.length < 60 ? GUTTER : 0;
}

class Mosaic {
  constructor(box, label, plan) {
    this.box = box;
    this.label = label;
    this.plan = plan;
    this.faded = new Set();
    this.lit = null;
    this.current = 0;
    whenSized(box, (width) => this.draw(width));
  }

  show(plan, faded = new Set()) {
    this.plan = plan;
    this.faded = faded;
    this.colour();
  }

  /** Highlight the tensors of one configuration. */
  light(configuration) {
    this.lit = configuration;
    this.colour();
  }

  draw(width) {
    const upright = width < NARROW; // layers become rows
    const along = upright ? Math.max(420, data.layers.length * 24) : width;
    const across = upright ? width - 64 : 340;
    this.gutter = upright ? 0 : gutterFor(width);
    const root = shape("svg", {
      viewBox: upright ? `0 0 ${width} ${along}` : `0 0 ${width} ${across + 24}`, role: "group", "aria-label": this.label,
    });
    this.blocks = [];
    this.places = [];
    const gap = data.layers.length > 60 ? 1 : 3;
    const room = along - this.gutter - gap * (data.layers.length - 1);
    const lengths = shares(inLayers.map((layer) => layer.reduce((sum, [tensor]) => sum + tensor.numel, 0)), room, upright ? 12 : 7);
    let start = this.gutter;
    inLayers.forEach((layer, number) => {
      const widths = shares(layer.map(([tensor]) => tensor.numel), across, 3);
      let offset = 0;
      layer.forEach(([tensor, index], place) => {
        const rect = upright
          ? { x: 64 + offset, y: start, width: widths[place], height: lengths[number] }
          : { x: start, y: offset, width: lengths[number], height: widths[place] };
        this.add(root, tensor, index, rect);
        this.places[index] = [number, place];
        offset += widths[place];
      });
      this.name(root, number, start, lengths[number], upright, across);
      start += lengths[number] + gap;
    });
    if (this.gutter) this.rows(root, across);
    this.box.replaceChildren(root);
    root.addEventListener("keydown", (event) => this.move(event, upright));
    root.addEventListener("pointerleave", () => hideTip());
    this.colour();
  }

  add(root, tensor, index, rect) {
    const thin = Math.min(rect.width, rect.height) < 4 ? " thin" : "";
    const block = shape("rect", { ...rect, rx: thin ? 0 : 2, class: `block${thin}`, role: "img", tabindex: index === this.current ? 0 : -1 });
    block.addEventListener("pointerenter", () => this.tell(index, block));
    block.addEventListener("focus", () => { this.current = index; this.tell(index, block); });
    block.addEventListener("blur", () => hideTip());
    this.blocks[index] = block;
    root.append(block);
    for (const line of [0, 1]) {
      if (rect.width < 60 || rect.height < 16 + 15 * line) break;
      const text = shape("text", { x: rect.x + 6, y: rect.y + 14 + 14 * line, class: "label" });
      Object.assign(text.dataset, { of: index, line, most: Math.floor((rect.width - 10) / 7.6) });
      root.append(text);
    }
  }

  /** Name the rows of the repeated layer, whose columns are too narrow for names. */
  rows(root, across) {
    const layer = inLayers[repeated];
    const heights = shares(layer.map(([tensor]) => tensor.numel), across, 3);
    let offset = 0;
    layer.forEach(([tensor], place) => {
      const words = within(tensor).replace(/\.weight$/, "").split(".").slice(-1)[0];
      if (heights[place] >= 11) {
        root.append(shape("text", { x: this.gutter - 6, y: offset + heights[place] / 2 + 4, "text-anchor": "end", class: "row" }, shorten(words, 13)));
      }
      offset += heights[place];
    });
  }

  name(root, number, start, length, upright, across) {
    const full = data.layers[number];
    const short = /^\d+$/.test(lastPart(full)) ? full.split(".").slice(-2).join(".") : lastPart(full);
    const fits = upright ? length >= 11 : length >= short.length * 6.4;
    const isNumber = /^\d+$/.test(lastPart(full));
    const text = fits ? short : isNumber ? (length >= 14 ? lastPart(full) : "") : length >= 32 ? shorten(short, Math.floor(length / 6.4)) : "";
    if (!text) return;
    const cut = upright ? shorten(text, 9) : text;
    root.append(upright
      ? shape("text", { x: 58, y: start + length / 2 + 4, "text-anchor": "end" }, cut)
      : shape("text", { x: start + length / 2, y: across + 17, "text-anchor": "middle" }, cut));
  }

  colour() {
    if (!this.blocks) return;
    this.blocks.forEach((block, index) => {
      const chosen = this.plan.configuration_of[index];
      block.style.fill = data.configurations[chosen].colour;
      block.classList.toggle("faded", this.faded.has(index) || (this.lit !== null && this.lit !== chosen));
      block.setAttribute("aria-label", `${data.tensors[index].name}: ${data.configurations[chosen].name}, ${bytes(data.configurations[chosen].bytes[index])}`);
    });
    for (const text of this.box.querySelectorAll("text.label")) {
      const index = Number(text.dataset.of);
      const configuration = data.configurations[this.plan.configuration_of[index]];
      const words = text.dataset.line === "0" ? within(data.tensors[index]) : configuration.name;
      text.textContent = shorten(words, text.dataset.most);
      text.setAttribute("class", `label light-${configuration.onLight} dark-${configuration.onDark}`);
      text.style.opacity = this.blocks[index].classList.contains("faded") ? 0.3 : 1;
    }
  }

  tell(index, block) {
    showTip(describe(this.plan, index), block);
  }

  move(event, upright) {
    const steps = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    let [layers, tensors] = steps[event.key] ?? [0, 0];
    if (event.key === "Escape") hideTip();
    if (!layers && !tensors) return;
    if (upright) [layers, tensors] = [tensors, layers];
    event.preventDefault();
    const [number, place] = this.places[this.current];
    const layer = inLayers[Math.min(Math.max(number + layers, 0), inLayers.length - 1)];
    const next = layer[Math.min(Math.max(place + tensors, 0), layer.length - 1)][1];
    this.blocks[this.current].setAttribute("tabindex", -1);
    this.blocks[next].setAttribute("tabindex", 0);
    this.blocks[next].focus();
  }
}

/** Details of one tensor in a plan. */
function describe(plan, index) {
  const tensor = data.tensors[index];
  const configuration = data.configurations[plan.configuration_of[index]];
  const block = plan.blocks[plan.block_of[index]];
  const rows = [
    ["configuration", configuration.name],
    ["state", `${bytes(configuration.bytes[index])} (${(configuration.bytes[index] / Math.max(1, tensor.numel)).toFixed(2)} B each)`],
    ["state of AdamW16", bytes(tensor.reference_bytes)],
    [isLoss ? "expected loss" : "risk", block.loss === null ? "not known" : lossText((block.loss * tensor.numel) / Math.max(1, block.numel))],
    ["block", `${block.name}${block.loss === null ? "" : `, ${lossText(block.loss)}`}`],
  ];
  if (block.host) rows.push(["location", "host memory"]);
  if (block.lr_scale !== null && block.lr_scale !== 1) rows.push(["learning rate", `× ${block.lr_scale.toPrecision(3)}`]);
  const parts = [
    element("h2", {}, tensor.name),
    element("p", {}, `${tensor.shape.join(" × ") || "scalar"} · ${quantity(tensor.numel)} parameters · ${tensor.role}`),
    list(rows),
  ];
  if (block.why) parts.push(element("p", { class: "why" }, block.why));
  if (tensor.metrics) {
    const metrics = list(Object.entries(tensor.metrics).map(([name, value]) => [name, value === null ? "–" : value.toPrecision(3)]));
    metrics.className = "metrics";
    parts.push(metrics);
  }
  return parts;
}

const list = (rows) => element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));

function showTip(parts, at) {
  const tip = byId("tip");
  tip.replaceChildren(...parts);
  tip.hidden = false;
  const box = at.getBoundingClientRect();
  const left = Math.min(Math.max(12, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 12);
  const above = box.top - tip.offsetHeight - 10;
  const below = Math.min(box.bottom + 10, innerHeight - tip.offsetHeight - 12);
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.max(8, below)}px`;
}

const hideTip = () => { byId("tip").hidden = true; };
