"use strict";
// The page is made of #data; every text is put in as a text node.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = ["#2f81f7", "#e0a100", "#c05bd6", "#2ea043", "#e5534b", "#39c5cf", "#9a6700", "#8b949e"];
  const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((part) => part * 10 ** power)).flat();  // between steps
  const color = (i) => COLORS[i % COLORS.length];
  const main = document.querySelector("main");
  const chosen = { log: false, smooth: 0, x: "step", filter: "", shown: data.runs.map(() => true) };
  const plots = [];
  let whole = null, zoomed = false, wide = data.headline;  // all of the x axis; whether less is shown; the large chart

  const make = (tag, properties = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element[name] = value;
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined)
        element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  };
  const dot = (color) => {
    const element = make("span", { class: "dot" });
    element.style.background = color;
    return element;
  };
  const tell = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en");
    return size >= 1e6 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  };
  const ticks = (splits) => {  // of an axis: short, with the digits that keep neighbors apart
    const sizes = splits.filter((value) => value).map(Math.abs), exponent = (value) => Math.floor(Math.log10(value));
    const gaps = splits.map((value, i) => (i && value !== null ? value - splits[i - 1] : 0)).filter((gap) => gap > 0);
    const digits = gaps.length && sizes.length ? exponent(Math.max(...sizes)) - exponent(Math.min(...gaps)) + 2 : 3;
    return splits.map((value) => {
      if (value === null) return "";
      const size = Math.abs(value), short = Number(value.toPrecision(Math.min(Math.max(digits, 3), 15)));
      const plain = Number.isInteger(short) ? short.toLocaleString("en") : String(short), power = short.toExponential();
      return size && (size >= 1e6 || size < 1e-3) && power.length < plain.length ? power : plain;
    });
  };
  const duration = (seconds) => {
    const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  };
  const table = (head, rows) => make("div", { class: "scroll" }, make("table", {},
    make("tr", {}, head.map((cell) => make("th", {}, cell))),
    rows.map((row) => make("tr", {}, row.map((cell) =>
      make("td", { class: typeof cell === "number" ? "number" : "" },
        typeof cell === "number" ? tell(cell) : cell))))));
  const contents = make("nav", { class: "contents" });
  const section = (title, ...children) => {
    const id = title.toLowerCase().replace(/[^a-z]+/g, "-");
    contents.append(make("a", { href: `#${id}` }, title));
    main.append(make("h2", { id }, title), ...children.flat(Infinity));
  };

  // ---- curves
  const between = (xs, ys, x) => {
    let low = 0, high = xs.length - 1;
    if (high < 0) return x;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    if (xs[high] === xs[low]) return ys[high];
    return ys[low] + (ys[high] - ys[low]) * Math.min(Math.max((x - xs[low]) / (xs[high] - xs[low]), 0), 1);
  };
  const smooth = (values, share) => {
    if (!share || values.length < 3) return values;
    const decay = 1 - 1 / Math.max(share * values.length, 1);
    let total = 0, weight = 0;
    return values.map((value) => {
      total = decay * total + value;
      weight = decay * weight + 1;
      return total / weight;
    });
  };
  const prepare = (run, [x, y], kind) => {
    const places = kind === "step" ? x : x.map((step) => between(...run.clock[kind], step));
    let values = smooth(y, chosen.smooth);
    if (chosen.log) values = values.map((value) => (value > 0 ? value : null));
    const xs = [], ys = [];  // x has to rise: an evaluation shares the step of its line
    places.forEach((place, i) => {
      if (xs.length && place <= xs[xs.length - 1]) ys[ys.length - 1] = values[i];
      else { xs.push(place); ys.push(values[i]); }
    });
    return [xs, ys];
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const sync = uPlot.sync("runs");

  const draw = (card, series, kind) => {
    const joined = series.length ? uPlot.join(series.map((one) => one.points)) : [[], []];
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const place = (value) => kind === "time" || kind === "seconds" ? duration(value)
      : kind === "tokens" && value >= 1e6 ? `${tell(value / 1e6)}M` : tell(value);
    const log = chosen.log && joined.slice(1).some((values) => values.some((value) => value > 0));
    const legend = make("div", { class: "legend hidden" });
    const plot = new uPlot({
      width: Math.max(card.clientWidth - 22, 200),
      height: card.classList.contains("wide") ? 480 : 190,
      cursor: { sync: kind === "seconds" ? undefined : { key: sync.key, scales: ["x", null] }, drag: { x: true, y: false },
        bind: { dblclick: (u, target, handle) => (event) => { zoomed = false; return handle(event); } } },
      scales: {
        x: { time: false, range: (u, min, max) => (kind === "seconds" || zoomed || !whole ? [min, max] : whole) },
        y: { distr: log ? 3 : 1, range: (u, min, max) => (min === null ? [null, null] : min === 0 && max === 0 ? [0, 1]
          : log ? uPlot.rangeLog(min, max, 10, false) : uPlot.rangeNum(min, max, 0.1, true)) },
      },
      axes: [
        { ...axis, size: 28, values: (u, splits) => splits.map(place), ...(kind === "step" ? { incrs: WHOLE } : {}) },
        { ...axis, size: (u, labels) => Math.max(62, ...(labels ?? []).map((label) => 14 + 7 * label.length)), values: (u, splits) => ticks(splits) },
      ],
      series: [{}, ...series.map((one) => ({ stroke: one.color, width: 1.5, spanGaps: true, points: { show: one.points[0].length < 25, size: 5 } }))],
      hooks: {
        setSelect: [(u) => { zoomed = zoomed || (u.select.width > 0 && kind !== "seconds"); }],
        setCursor: [(u) => {
          const index = u.cursor.idx, outside = index === null || index === undefined;
          const values = series.map((one, i) => outside ? one.last : nearest(u.data[i + 1], index));
          card.querySelector(".value").textContent = values.map(tell).join("  ");
          // The cursor moves in every chart at once; the legend is beside the pointer's.
          legend.classList.toggle("hidden", outside || !u.over.matches(":hover"));
          if (outside) return;
          legend.replaceChildren(make("div", { class: "soft" }, `${kind === "seconds" ? "time" : kind} ${place(u.data[0][index])}`),
            ...series.map((one, i) => make("div", {}, dot(one.color), ` ${one.name} `, make("b", {}, tell(values[i])))));
          const { left, top } = u.cursor, right = left > u.over.clientWidth / 2;
          legend.style.left = right ? "" : `${left + 12}px`;
          legend.style.right = right ? `${u.over.clientWidth - left + 12}px` : "";
          legend.style.top = `${Math.max(0, Math.min(top, u.over.clientHeight - legend.offsetHeight))}px`;
        }],
        setScale: [(u, name) => {
          if (name !== "x" || u.quiet || kind === "seconds" || !u.ready) return;
          const { min, max } = u.scales.x;
          for (const other of plots) if (other !== u && other.kind === kind) {
            other.quiet = true;
            other.setScale("x", { min, max });
            other.quiet = false;
          }
        }],
        ready: [(u) => { u.ready = true; }],
      },
    }, joined, card);
    plot.over.append(legend);
    plot.kind = kind;
    card.plot = plot;
    return plot;
  };
  const nearest = (values, index) => {
    for (let apart = 0; apart < values.length; apart++) {
      const before = values[index - apart], after = values[index + apart];
      if (before !== null && before !== undefined) return before;
      if (after !== null && after !== undefined) return after;
    }
    return null;
  };

  const grid = make("div", { class: "charts" });
  const redraw = () => {
    for (const plot of plots.splice(0)) plot.destroy();
    let pattern = null;
    try { pattern = chosen.filter ? new RegExp(chosen.filter, "i") : null; } catch { /* being typed */ }
    const steps = data.runs.filter((run, i) => chosen.shown[i] && run.clock.time[0].length)
      .flatMap((run) => chosen.x === "step" ? run.clock.time[0] : run.clock[chosen.x][1]);
    const low = steps.reduce((a, b) => Math.min(a, b), Infinity), high = steps.reduce((a, b) => Math.max(a, b), -Infinity);
    zoomed = false;
    whole = low < high ? [low, high] : null;
    for (const card of grid.children) {
      const name = card.metric, fits = !pattern || pattern.test(name);
      const series = data.runs.map((run, i) => ({ run, i }))
        .filter(({ run, i }) => chosen.shown[i] && Object.hasOwn(run.curves, name))
        .map(({ run, i }) => ({ points: prepare(run, run.curves[name], chosen.x), color: color(i), name: run.name, last: run.last[name] }));
      card.classList.toggle("hidden", !fits || !series.length);
      card.classList.toggle("wide", wide === name);
      card.querySelector(".value").textContent = series.map((one) => tell(one.last)).join("  ");
      if (fits && series.length) plots.push(draw(card, series, chosen.x));
    }
    for (const card of document.querySelectorAll(".hardware .card"))
      plots.push(draw(card, [{ points: card.points, color: color(card.place), name: card.run, last: card.points[1].at(-1) }], "seconds"));
    document.documentElement.dataset.ready = String(plots.length);
  };
  const card = (name, properties = {}) => Object.assign(make("div", { class: "card" },
    make("h3", { onclick: () => { wide = wide === name ? null : name; redraw(); } },
      make("span", { class: "value" }), name)), properties);

  // ---- head
  const names = data.runs.map((run) => run.name).join(", ");
  const mark = { finished: "good", failed: "bad", silent: "bad" };
  main.append(make("h1", {}, names),
    ...data.runs.map((run) => make("p", { class: "result" }, make("b", { class: mark[run.state] ?? "" }, run.state), ` ${run.result.replaceAll(" -> ", "\u00a0→\u00a0")}`)),
    make("div", { class: "soft" }, `written ${data.time}`), contents);

  // ---- charts
  if (data.charts.length) {
    const bar = make("div", { class: "bar" },
      make("input", { type: "search", placeholder: "filter: loss|reward", oninput: (e) => { chosen.filter = e.target.value; redraw(); } }),
      make("label", {}, make("input", { type: "checkbox", oninput: (e) => { chosen.log = e.target.checked; redraw(); } }), "log y"),
      make("label", {}, "smoothing", make("select", { oninput: (e) => { chosen.smooth = Number(e.target.value); redraw(); } },
        ["0", "0.05", "0.2"].map((value) => make("option", { value }, `${100 * value} %`)))),
      make("label", {}, "by", make("select", { oninput: (e) => { chosen.x = e.target.value; redraw(); } },
        ["step", "time", "tokens"].map((value) => make("option", { value }, value)))),
      data.runs.length > 1 ? data.runs.map((run, i) => make("label", {}, make("input", {
        type: "checkbox", checked: true, oninput: (e) => { chosen.shown[i] = e.target.checked; redraw(); },
      }), dot(color(i)), run.name)) : null,
      make("span", { class: "soft" }, "drag: zoom all, double click: whole, click a title: large"));
    section("Charts", bar, grid);
    for (const name of data.charts) grid.append(card(name, { metric: name }));
  }

  section("Runs", table(
    ["", "run", "state", "method", "model", "devices", "step", "time", "best", "", "newest", "tok/s/device", "MFU"],
    data.runs.map((run, i) => [
      dot(color(i)), run.path, make("span", { class: mark[run.state] ?? "" }, `${run.state} ${run.message}`),
      run.task, run.model, run.devices, `${tell(run.step)}/${tell(run.total_steps)}`, duration(run.seconds),
      run.best ? `${run.best.metric}` : "", run.best ? `${tell(run.best.value)} at ${tell(run.best.step)}` : "",
      run.best ? tell(run.last[run.best.metric]) : "",
      tell(run.last.tokens_per_second_per_device), run.last.mfu ? `${(100 * run.last.mfu).toFixed(1)} %` : "–",
    ])));

  // ---- evaluations
  const evals = data.charts.filter((name) => name.startsWith("eval/"));
  if (evals.length) section("Evaluations", table(
    ["metric", ...data.runs.flatMap((run) => [`${run.name}: first`, "least", "greatest", "newest"])],
    evals.map((name) => [name.slice(5), ...data.runs.flatMap((run) => {
      const y = run.curves[name]?.[1] ?? [];
      if (!y.length) return ["–", "–", "–", "–"];
      const low = y.reduce((a, b) => Math.min(a, b)), high = y.reduce((a, b) => Math.max(a, b));
      return [y[0], low, high, y.at(-1)];
    })])));

  // ---- samples
  const message = (run) => ([role, text, calls, images]) => [
    make("div", { class: "role" }, role), make("pre", {}, text),
    images.map((key) => make("img", { class: "thumbnail", src: run.thumbnails[key], alt: "" })),
    calls ? make("details", {}, make("summary", { class: "soft" }, "tool calls"), make("pre", {}, calls)) : null,
  ];
  const sample = (run) => (one) => make("div", { class: "sample" },
    make("div", {}, make("b", { class: one.reward > 0 ? "good" : "bad" }, one.reward === null ? "" : `reward ${tell(one.reward)}`),
      make("span", { class: "soft" }, one.facts.map(([name, value]) => `  ${name} ${tell(value)}`).join(" "))),
    one.prompt.map(message(run)), one.answer.map(message(run)));
  if (data.runs.some((run) => run.samples.length)) {
    section("Samples");
    data.runs.forEach((run, i) => run.samples.forEach((step, place) => main.append(make("details",
      { open: i === 0 && place === 0 }, make("summary", {}, dot(color(i)), ` ${run.name}, step ${tell(step.step)}: best and worst`),
      step.samples.map(sample(run))))));
  }

  // ---- configs
  const value = (run, key) => Object.hasOwn(run.config, key) ? JSON.stringify(run.config[key]) : "–";
  const heads = () => ["key", ...data.runs.map((run, i) => make("span", {}, dot(color(i)), ` ${run.name}`))];
  if (data.runs.length > 1) section("Config: what differs", data.differing.length
    ? table(heads(), data.differing.map((key) => [key, ...data.runs.map((run) => value(run, key))]))
    : make("p", {}, "nothing"));
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))];
  section("Config", make("details", {}, make("summary", {}, `${keys.length} keys`),
    table(heads(), keys.map((key) => [key, ...data.runs.map((run) => value(run, key))]))));

  // ---- starts, warnings, hardware
  section("Starts", table(["", "time", "host", "devices", "command", "versions"],
    data.runs.flatMap((run, i) => run.attempts.map((one) => [dot(color(i)), one.time, one.host, one.devices,
      make("pre", {}, one.command), Object.entries(one.versions).map(([name, version]) => `${name} ${version}`).join(", ")]))));
  const warned = data.runs.filter((run) => run.warnings.length);
  if (warned.length) section("Warnings", warned.map((run) => make("details", { open: run.warnings.length < 8 },
    make("summary", {}, `${run.name}: ${run.warnings.length}`), make("pre", {}, run.warnings.join("\n")))));
  const measured = data.runs.flatMap((run, i) => Object.entries(run.hardware).map(([name, points]) =>
    card(data.runs.length > 1 ? `${run.name}: ${name}` : name, { points, place: i, run: run.name })));
  if (measured.length) section("Hardware", make("div", { class: "charts hardware" }, measured));

  redraw();
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(redraw, 150); };
  addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
})();
