// Elements, number formats, scales and the colors of configurations.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${count.toFixed(unit === 0 ? 0 : unit < 3 ? 1 : 2)} ${units[unit]}`;
}

function quantity(count) {
  for (const [factor, unit] of [[1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
    if (count >= factor) return `${(count / Math.min(factor, unit === "K" ? 1e3 : factor)).toFixed(1)}${unit}`;
  }
  return String(count);
}

/** Round ticks in the unit of the largest value. */
function byteTicks(low, high, count) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(1, high)) / 10));
  return ticks(low / unit, high / unit, count).map((tick) => tick * unit);
}

const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)}%`;
const signed = (value, digits = 2) => `${value < 0 ? "\u2212" : value > 0 ? "+" : ""}${Math.abs(value).toFixed(digits)}`;
const isLoss = data.frontier.concat(data.plans).some((plan) => plan.loss !== null);
const lossText = (value) => (value === null ? "not known" : isLoss ? `${signed(value)}%` : value.toFixed(3));

// Hue by update rule (Okabe and Ito's palette for color blindness), strength by bytes of state.
const HUES = {
  adamw: "#0072B2", muon: "#D55E00", spectral: "#009E73", colnorm: "#CC79A7", normuon: "#E69F00", lion: "#56B4E9",
  adafactor: "#8A7A00", adam: "#56B4E9", sgdwm: "#E69F00", sgdm: "#E69F00", sgdw: "#009E73", sgd: "#009E73",
};
const SPARE = ["#7A5195", "#666666", "#8A7A00", "#CC79A7"];
const MOST_BYTES = 4; // per element, as in AdamW16; more has the same color
// Share of the hue in a color, from the weakest on; the rest is the surface. Hues are lifted toward white.
const THEMES = { light: { surface: 255, lift: 0, weakest: 0.3, span: 0.66 }, dark: { surface: 25, lift: 0.14, weakest: 0.58, span: 0.4 } };

/** Whether white or black text is easier to read on the color of a configuration. */
function readable(hue, strength, { surface, lift, weakest, span }) {
  const share = weakest + strength * span;
  const lifted = [1, 3, 5].map((at) => parseInt(hue.slice(at, at + 2), 16) * (1 - lift) + 255 * lift);
  const channels = lifted.map((each) => (each * share + surface * (1 - share)) / 255);
  const [red, green, blue] = channels.map((each) => (each <= 0.04 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18 ? "white" : "black";
}

/** A color depends on the configuration alone, so it is the same in every report. */
function paint(configurations) {
  for (const configuration of configurations) {
    const { mechanism, each } = configuration;
    const hue = HUES[mechanism] ?? SPARE[[...mechanism].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % SPARE.length];
    const strength = each ? Math.min(1, Math.max(0, 1 + Math.log2(each / MOST_BYTES) / 4)) : 1; // a quarter less for each half; rules without state have one form
    const share = `calc(var(--weakest) + ${strength.toFixed(2)} * var(--span))`;
    configuration.colour = `color-mix(in oklab, color-mix(in oklab, white var(--lift), ${hue}) ${share}, var(--surface))`;
    configuration.onLight = readable(hue, strength, THEMES.light);
    configuration.onDark = readable(hue, strength, THEMES.dark);
  }
}
paint(data.configurations);

const linear = (from, to) => (value) => to[0] + ((value - from[0]) / (from[1] - from[0] || 1)) * (to[1] - to[0]);
function logarithmic(from, to) {
  const inner = linear(from.map((each) => Math.log(Math.max(1, each))), to);
  return (value) => inner(Math.log(Math.max(1, value)));
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function powersOfTwo(low, high, most) {
  const found = [];
  for (let at = Math.ceil(Math.log2(Math.max(1, low))); at <= Math.log2(high); at += 1) found.push(2 ** at);
  const every = Math.ceil(found.length / most);
  return found.filter((_, index) => index % every === 0);
}

const whenSized = (box, draw) => {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== width) { width = box.clientWidth; draw(width); }
  }).observe(box);
};
