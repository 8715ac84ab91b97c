// Speed against memory: all dots of a kind are one path, so that ten thousand are drawn in a moment.
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [900, 420, 80, 20, 20, 60];

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function round(most) {  // the next of 1, 2, 5 times a power of ten that makes at most six steps
  const step = 10 ** Math.floor(Math.log10(most / 6));
  return [1, 2, 5, 10].map((each) => each * step).find((each) => most / each <= 6);
}

export class Chart {
  constructor(bytes) {
    this.bytes = bytes;
    this.points = [];
    this.at = -1;
    this.element = document.createElement("figure");
    this.svg = draw(this.element, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
    this.words = document.createElement("figcaption");
    this.words.setAttribute("aria-live", "polite");
    this.element.append(this.words);
    this.svg.addEventListener("pointermove", (event) => this.near(event));
    this.svg.addEventListener("keydown", (event) => this.step(event));
  }

  draw(rows, limit, best, ended) {
    const chosen = this.points[this.at]?.row.number;
    const measured = rows.filter((row) => row.samples_per_s && row.peak_bytes).sort((a, b) => a.peak_bytes - b.peak_bytes);
    this.svg.replaceChildren();
    this.svg.toggleAttribute("hidden", !measured.length);  // no axes without anything on them
    if (!measured.length) {
      this.points = [];
      this.words.textContent = ended ? "No trial was measured." : "No trial has been measured yet.";
      return;
    }
    const within = measured.at(-1).peak_bytes;
    const right = 1.08 * Math.max(within, limit && limit < 4 * within ? limit : 0, 1);
    const top = 1.1 * measured.reduce((most, row) => Math.max(most, row.samples_per_s), 1e-9);
    const x = (value) => LEFT + (WIDTH - LEFT - RIGHT) * value / right;
    const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top;
    this.axes(right, top, x, y);
    if (limit && limit <= right) {
      draw(this.svg, "line", { class: "budget", x1: x(limit), x2: x(limit), y1: TOP, y2: HEIGHT - BOTTOM });
      draw(this.svg, "text", { class: "budget-words", x: x(limit) - 6, y: TOP + 16, "text-anchor": "end" }, `budget ${this.bytes(limit)}`);
    } else if (limit) {
      draw(this.svg, "text", { class: "budget-words", x: WIDTH - RIGHT, y: TOP + 16, "text-anchor": "end" }, `budget ${this.bytes(limit)} →`);
    }
    this.points = measured.map((row) => ({ row, x: x(row.peak_bytes), y: y(row.samples_per_s) }));
    const path = (points) => points.map((point) => `M${point.x.toFixed(1)} ${point.y.toFixed(1)}h0`).join("");
    draw(this.svg, "path", { class: "dots over", d: path(this.points.filter((point) => !point.row.fits)) });
    draw(this.svg, "path", { class: "dots", d: path(this.points.filter((point) => point.row.fits)) });
    for (const point of this.points) {
      if (point.row.number === 0) draw(this.svg, "circle", { class: "reference", cx: point.x, cy: point.y, r: 8 });
      if (point.row.number === best) draw(this.svg, "circle", { class: "best", cx: point.x, cy: point.y, r: 8 });
    }
    this.ring = draw(this.svg, "circle", { class: "at", r: 12, visibility: "hidden" });
    const names = `${measured.length} trials measured` + (limit ? `, budget ${this.bytes(limit)}` : "");
    this.svg.setAttribute("aria-label", `Speed against memory: ${names}. Arrow keys go from trial to trial.`);
    this.at = this.points.findIndex((point) => point.row.number === chosen);
    if (this.at >= 0) this.show(this.at);
    else this.words.textContent = "○ the job as it stands  ● the best trial";
  }

  axes(right, top, x, y) {
    const unit = right > 4 * 2 ** 30 ? 2 ** 30 : 2 ** 20, name = unit === 2 ** 30 ? "GiB" : "MiB";
    const across = round(right / unit), up = round(top);
    for (let value = 0; value <= right / unit; value += across) {
      const at = x(value * unit);
      draw(this.svg, "line", { class: "axis", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
      draw(this.svg, "text", { x: at, y: HEIGHT - BOTTOM + 22, "text-anchor": "middle" }, Number(value.toPrecision(3)).toLocaleString("en"));
    }
    for (let value = 0; value <= top; value += up) {
      draw(this.svg, "line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) });
      draw(this.svg, "text", { x: LEFT - 8, y: y(value) + 5, "text-anchor": "end" }, Number(value.toPrecision(3)).toLocaleString("en"));
    }
    draw(this.svg, "text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, `peak memory, ${name}`);
    draw(this.svg, "text", { x: 18, y: HEIGHT / 2, "text-anchor": "middle", transform: `rotate(-90 18 ${HEIGHT / 2})` }, "samples per second");
  }

  near(event) {
    const box = this.svg.getBoundingClientRect();
    const px = (event.clientX - box.left) * WIDTH / box.width, py = (event.clientY - box.top) * HEIGHT / box.height;
    let found = -1, least = 30 ** 2;
    this.points.forEach((point, place) => {
      const distance = (point.x - px) ** 2 + (point.y - py) ** 2;
      if (distance < least) [found, least] = [place, distance];
    });
    if (found >= 0) this.show(found);
  }

  step(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !this.points.length) return;
    event.preventDefault();
    this.show((this.at + move + this.points.length) % this.points.length);
  }

  show(place) {
    this.at = place;
    const { row, x, y } = this.points[place];
    this.ring.setAttribute("cx", x);
    this.ring.setAttribute("cy", y);
    this.ring.setAttribute("visibility", "visible");
    this.words.textContent = `${row.number === 0 ? "The job as it stands" : `Trial ${row.number}: ${row.settings}`}: ${row.words}`;
  }
}
