// The three views, the tabs between them, and the theme.

const everyPlan = [...data.plans, ...data.frontier];

function number(value, words, tone = "") {
  return element("div", { class: `number ${tone}` }, element("b", {}, value), element("span", {}, words));
}

const tone = (loss) => (loss === null || !isLoss || Math.abs(loss) < data.tolerance ? "" : loss < 0 ? "good" : "bad");
const shareOf = (plan) => `${percent(plan.bytes / data.reference_bytes)} of AdamW16's`;
const lossWords = isLoss ? "expected loss against AdamW32" : "risk";

function predicted(plan) {
  const interval = plan.interval ? ` (${plan.interval.map((end) => signed(end, 1)).join(" to ")})` : "";
  return lossText(plan.loss ?? plan.risk) + interval;
}

function cells(kind, values, numeric) {
  return element("tr", {}, ...values.map((value, index) => element(kind, numeric.includes(index) ? { class: "n" } : {}, value)));
}

function tableOf(header, rows, numeric) {
  return element("table", {}, element("thead", {}, cells("th", header, numeric)), element("tbody", {}, ...rows.map((row) => cells("td", row, numeric))));
}

function named(configuration) {
  return element("span", { class: "named" }, swatch(configuration), configuration.name);
}

function swatch(configuration) {
  const made = element("span", { class: "swatch" });
  made.style.background = configuration.colour;
  return made;
}

// ---- explore ----

function explore() {
  const plans = data.frontier.length ? data.frontier : data.plans;
  byId("caption-frontier").textContent = `${isLoss ? "Expected loss" : "Risk"} against optimizer state`;
  const slider = byId("budget");
  slider.max = plans.length - 1;
  byId("slide").hidden = plans.length < 2;
  byId("frontier").closest("figure").hidden = data.frontier.length < 2;
  const mosaic = new Mosaic(byId("model"), "The model's tensors in forward order", plans[0]);
  const chart = data.frontier.length > 1 ? new FrontierChart(byId("frontier"), (index) => go(index)) : null;
  const jumps = [
    ["smallest", 0], ["knee", data.knee], ["auto", data.auto], ["largest", plans.length - 1],
  ].filter(([, index]) => index !== null && plans.length > 1);
  const buttons = jumps.map(([name, index]) => {
    const button = element("button", { type: "button" }, `${name} · ${bytes(plans[index].bytes)}`);
    button.addEventListener("click", () => go(index));
    byId("jumps").append(button);
    return [button, index];
  });

  function go(index) {
    const plan = plans[index];
    slider.value = index;
    slider.setAttribute("aria-valuetext", `${bytes(plan.bytes)} of state, ${lossWords} ${predicted(plan)}`);
    const source = plan.source ? `, ${plan.source}` : "";
    const shown = [number(bytes(plan.bytes), `of state, ${shareOf(plan)}`), number(predicted(plan), lossWords + source, tone(plan.loss))];
    if (plan.time !== null) shown.push(number(`${plan.time.toFixed(2)}×`, isLoss ? "a training step with AdamW16" : "AdamW16's update time"));
    byId("numbers").replaceChildren(...shown);
    for (const [button, at] of buttons) button.setAttribute("aria-pressed", at === index);
    if (chart) chart.show(index);
    mosaic.show(plan);
    legend(plan, mosaic);
  }

  slider.addEventListener("input", () => go(Number(slider.value)));
  go(data.auto ?? data.knee ?? 0);
}

function legend(plan, mosaic) {
  const rows = data.configurations.map((configuration, which) => {
    const mine = data.tensors.map((_, index) => index).filter((index) => plan.configuration_of[index] === which);
    const parameters = mine.reduce((sum, index) => sum + data.tensors[index].numel, 0);
    const state = mine.reduce((sum, index) => sum + configuration.bytes[index], 0);
    return { configuration, which, mine, parameters, state };
  }).filter(({ mine }) => mine.length).sort((a, b) => b.parameters - a.parameters);
  const body = rows.map(({ configuration, which, mine, parameters, state }) => {
    const key = element("button", { class: "key", type: "button", title: configuration.spelling }, swatch(configuration), configuration.name);
    for (const on of ["pointerenter", "focus"]) key.addEventListener(on, () => mosaic.light(which));
    for (const off of ["pointerleave", "blur"]) key.addEventListener(off, () => mosaic.light(null));
    const share = element("span", { class: "share" });
    share.style.width = percent(parameters / elements);
    share.style.background = configuration.colour;
    return [element("span", {}, key, share), String(mine.length), quantity(parameters), bytes(state)];
  });
  byId("legend").replaceChildren(tableOf(["configuration", "tensors", "parameters", "state"], body, [1, 2, 3]));
}

// ---- compare ----

let compareWith = () => {};

function compare() {
  const [a, b] = [byId("plan-a"), byId("plan-b")];
  for (const select of [a, b]) {
    everyPlan.forEach((plan, index) => select.append(element("option", { value: index }, `${plan.name} · ${bytes(plan.bytes)}`)));
  }
  const mosaics = [new Mosaic(byId("model-a"), "Plan A", everyPlan[0]), new Mosaic(byId("model-b"), "Plan B", everyPlan[0])];

  function show() {
    const pair = [everyPlan[a.value], everyPlan[b.value]];
    const alike = new Set(data.tensors.map((_, index) => index).filter((index) => pair[0].configuration_of[index] === pair[1].configuration_of[index]));
    const faded = byId("dim").checked && alike.size < data.tensors.length ? alike : new Set();
    mosaics.forEach((mosaic, side) => mosaic.show(pair[side], faded));
    ["a", "b"].forEach((side, index) => {
      byId(`caption-${side}`).replaceChildren(`${side.toUpperCase()}: ${pair[index].name} `, element("small", {}, `${bytes(pair[index].bytes)} of state, ${lossWords} ${predicted(pair[index])}`));
    });
    const [before, after] = pair;
    const moved = data.tensors.length - alike.size;
    const change = after.bytes - before.bytes;
    const shown = [
      number(`${change < 0 ? "\u2212" : "+"}${bytes(Math.abs(change))}`, `of state from A to B${before.bytes ? `, ${signed((100 * change) / before.bytes, 1)}%` : ""}`),
      number(`${moved} of ${data.tensors.length}`, "tensors change"),
    ];
    if (before.risk !== null && (!isLoss || (before.loss !== null && after.loss !== null))) {
      const loss = after.risk - before.risk;
      shown.splice(1, 0, number(isLoss ? `${signed(loss)}%` : signed(loss, 3), isLoss ? "expected loss" : "risk", tone(loss)));
    }
    byId("difference").replaceChildren(...shown);
    changes(before, after, alike);
  }

  function changes(before, after, alike) {
    const groups = new Map();
    data.tensors.forEach((tensor, index) => {
      if (alike.has(index)) return;
      const key = `${before.configuration_of[index]}>${after.configuration_of[index]}`;
      const group = groups.get(key) ?? { from: before.configuration_of[index], to: after.configuration_of[index], names: [], numel: 0, was: 0, is: 0 };
      group.names.push(tensor.name);
      group.numel += tensor.numel;
      group.was += data.configurations[group.from].bytes[index];
      group.is += data.configurations[group.to].bytes[index];
      groups.set(key, group);
    });
    const rows = [...groups.values()].sort((x, y) => y.numel - x.numel).map((group) => {
      const [from, to] = [data.configurations[group.from], data.configurations[group.to]];
      const some = group.names.slice(0, 2).join(", ") + (group.names.length > 2 ? ` and ${group.names.length - 2} more` : "");
      return [element("span", {}, named(from), " → ", named(to)), some, quantity(group.numel), bytes(group.was), bytes(group.is)];
    });
    byId("changes").replaceChildren(rows.length ? tableOf(["configuration", "tensors", "parameters", "state in A", "in B"], rows, [2, 3, 4]) : element("p", {}, "None: both plans are the same."));
  }

  compareWith = (first, second) => { a.value = first; b.value = second; show(); select("compare"); };
  for (const control of [a, b, byId("dim")]) control.addEventListener("change", show);
  const start = data.plans.length ? 0 : data.auto ?? 0;
  const differs = everyPlan.findIndex((plan) => plan.configuration_of.some((which, index) => which !== everyPlan[start].configuration_of[index]));
  a.value = start;
  b.value = Math.max(0, differs);
  show();
}

// ---- run ----

const lastBefore = (points, step) => points.findLast(([at]) => at <= step) ?? points[0];

function run() {
  const { loss, smooth, state_bytes: held, phases, events, plan_steps: planSteps, last_step: last } = data.run;
  const end = smooth.at(-1);
  byId("outcome").replaceChildren(
    number(end ? end[1].toPrecision(4) : "–", "loss at the end, smoothed"),
    number(bytes(held.at(-1)[1]), `of state at the end, ${percent(held.at(-1)[1] / data.reference_bytes)} of AdamW16's`),
    number(bytes(Math.max(...held.map(([, count]) => count))), "of state at the peak"),
    number(String(last), "steps"),
  );
  const charts = [];
  const move = (step) => {
    const at = Math.min(Math.max(step, phases[0][0]), last);
    charts.forEach((chart) => chart.point(at));
    const now = lastBefore(smooth, at);
    byId("readout").textContent = `step ${at}: loss ${now ? now[1].toPrecision(4) : "–"}, ${bytes(lastBefore(held, at)[1])} of state, ${lastBefore(phases, at)[1]}`;
  };
  charts.push(new RunChart(byId("loss"), 300, [{ points: loss, kind: "raw" }, { points: smooth, kind: "" }], {
    id: "loss", words: "Loss over steps, as logged and smoothed", ticks, y: (tick) => String(Number(tick.toPrecision(3))),
  }, move));
  charts.push(new RunChart(byId("state"), 190, [{ points: held, kind: "", isStairs: true }], {
    id: "state", words: "Bytes of optimizer state over steps", ticks: byteTicks, y: bytes,
  }, move, true));
  const place = data.plans.length - planSteps.length;
  const rows = events.map(([step, text]) => {
    const index = text.startsWith("new plan") ? planSteps.indexOf(step) : -1;
    if (index < 1) return [String(step), text];
    const button = element("button", { class: "link", type: "button" }, "compare");
    button.addEventListener("click", () => compareWith(place + index - 1, place + index));
    return [String(step), element("span", {}, `${text} `, button)];
  });
  byId("events").replaceChildren(rows.length ? tableOf(["step", "event"], rows, []) : element("p", {}, "No events were logged."));
}

// ---- the page ----

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(view) {
  for (const tab of tabs) {
    const isIt = tab.getAttribute("aria-controls") === view;
    tab.setAttribute("aria-selected", isIt);
    tab.tabIndex = isIt ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isIt;
  }
  hideTip();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const shown = tabs.filter((each) => !each.hidden);
    const next = shown[(shown.indexOf(tab) + step + shown.length) % shown.length];
    select(next.getAttribute("aria-controls"));
    next.focus();
  });
}

function theme(name) {
  const root = document.documentElement;
  root.dataset.theme = name;
  for (const part of ["lift", "weakest", "span"]) root.style.setProperty(`--${part}`, percent(THEMES[name][part]));
  byId("theme").textContent = name === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `switch to the ${name === "dark" ? "light" : "dark"} theme`);
  byId("theme").setAttribute("aria-pressed", name === "dark");
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
theme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => theme(prefersDark.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

byId("title").textContent = data.title;
const regimes = { scratch: " · from scratch", finetune: " · fine-tuning" };
byId("facts").textContent = `${quantity(elements)} parameters in ${data.tensors.length} tensors · state of AdamW16: ${bytes(data.reference_bytes)}${regimes[data.regime] ?? ""}`;

explore();
byId("tab-compare").hidden = everyPlan.length < 2;
if (everyPlan.length > 1) compare();
byId("tab-run").hidden = data.run === null;
if (data.run !== null) run();
select(data.run !== null && !data.frontier.length ? "run" : "explore");
addEventListener("scroll", hideTip, { passive: true });
