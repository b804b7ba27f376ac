// The photo and its boxes: zoom, pan, select, move, resize and draw, with mouse, pen, fingers and keys.

import { colourOf, inside, moved, sameBox, shownBoxes } from "./model.js";

const EDGE = 8; // pixels on screen around an edge within which it can be grabbed; twice as much for fingers
const CLICK = 4;
const LARGEST = 24; // screen pixels per pixel of the photo
const MARGIN = 20;
const LEAST_NAME = 40; // pixels on screen of a box that shows its name, and of one that shows handles
const LEAST_CORNERS = 26;
const LEAST_SIDES = 64;
const SIDES = { nw: "nwse", se: "nwse", ne: "nesw", sw: "nesw", n: "ns", s: "ns", w: "ew", e: "ew" };

export class Stage {
  // on: select(number or null), change(number, box), draw(box), zoomed(scale)
  constructor(element, on) {
    this.element = element;
    this.image = element.querySelector("#photo");
    this.layer = element.querySelector("#boxes");
    this.cross = element.querySelector("#cross");
    this.on = on;
    this.photo = null;
    this.classes = [];
    this.selected = null;
    this.draft = null; // {number, box}: a change that is not finished yet
    this.drawing = null; // {from, at}: corners of a box that is being drawn
    this.view = { scale: 1, x: 0, y: 0, fits: true };
    this.pointers = new Map();
    this.grab = null;
    element.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    element.addEventListener("pointerdown", (event) => this.#down(event));
    element.addEventListener("pointermove", (event) => this.#move(event));
    element.addEventListener("pointerup", (event) => this.#up(event));
    element.addEventListener("pointercancel", (event) => this.#up(event));
    new ResizeObserver(() => (this.view.fits ? this.fit() : this.render())).observe(element);
  }

  // ---------------------------------------------------------------- content

  show(photo, { keepView = false } = {}) {
    this.photo = photo;
    this.draft = null;
    if (!keepView) {
      this.stopDrawing();
      this.fit();
    }
    this.render();
  }

  boxOf(box) {
    if (this.draft?.number !== box.number) return box.box;
    return this.draft.box;
  }

  render() {
    const { photo, view } = this;
    if (!photo) return;
    this.image.style.width = `${photo.width}px`;
    this.image.style.height = `${photo.height}px`;
    this.image.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
    this.image.classList.toggle("sharp", view.scale > 3);
    const parts = shownBoxes(photo).map((box) => this.#part(box));
    const chosen = photo.boxes.find((box) => box.number === this.selected);
    if (chosen?.alternative) parts.push(this.#outline(sameBox(chosen.box, chosen.alternative) ? chosen.first : chosen.alternative, "other"));
    if (this.drawing?.from) parts.push(this.#outline(this.#drawn(), "selected"));
    this.layer.replaceChildren(...parts);
    this.#renderCross();
  }

  #part(box) {
    const part = this.#outline(this.boxOf(box), box.decision);
    part.style.setProperty("--colour", colourOf(this.classes, box.name));
    part.classList.toggle("doubtful", Boolean(box.is_doubtful) && box.decision === "open");
    const name = document.createElement("span");
    const sign = { accepted: "✓ ", rejected: "✕ ", open: box.is_doubtful ? "? " : "" }[box.decision];
    name.textContent = sign + box.name;
    const [width, height] = [Number.parseFloat(part.style.width), Number.parseFloat(part.style.height)];
    const isSelected = box.number === this.selected;
    if (isSelected || width >= LEAST_NAME) part.append(name); // names of small boxes would hide their neighbours
    if (!isSelected) name.style.maxWidth = `${Math.max(width + 3, LEAST_NAME)}px`;
    if (isSelected) {
      part.classList.add("selected");
      const sides = Object.keys(SIDES).filter((side) => Math.min(width, height) >= (side.length === 2 ? LEAST_CORNERS : LEAST_SIDES));
      part.append(...sides.map(handle));
    }
    return part;
  }

  #outline([x1, y1, x2, y2], kind) {
    const { scale, x, y } = this.view;
    const part = document.createElement("div");
    part.className = `box ${kind}`;
    part.style.transform = `translate(${x1 * scale + x}px, ${y1 * scale + y}px)`;
    part.style.width = `${Math.max(3, (x2 - x1) * scale)}px`;
    part.style.height = `${Math.max(3, (y2 - y1) * scale)}px`;
    part.classList.toggle("low", y1 * scale + y < 22);
    return part;
  }

  // ---------------------------------------------------------------- view

  fit() {
    const { clientWidth, clientHeight } = this.element;
    if (!this.photo || !clientWidth) return;
    const margin = clientWidth < 500 ? 6 : MARGIN;
    const scale = Math.min((clientWidth - 2 * margin) / this.photo.width, (clientHeight - 2 * margin) / this.photo.height, LARGEST);
    this.view = {
      scale,
      x: (clientWidth - this.photo.width * scale) / 2,
      y: (clientHeight - this.photo.height * scale) / 2,
      fits: true,
    };
    this.least = scale;
    this.render();
  }

  zoom(factor, at = null) {
    if (!this.photo) return;
    const { clientWidth, clientHeight } = this.element;
    const [px, py] = at ?? this.#focus() ?? [clientWidth / 2, clientHeight / 2];
    const scale = Math.min(Math.max(this.view.scale * factor, this.least * 0.9), Math.max(LARGEST, this.least));
    if (scale <= this.least) return void this.fit();
    const ratio = scale / this.view.scale;
    this.view = { scale, x: px - (px - this.view.x) * ratio, y: py - (py - this.view.y) * ratio, fits: false };
    this.#keepInSight();
    this.on.zoomed(scale);
    this.render();
  }

  #focus() {
    const box = this.photo.boxes.find((own) => own.number === this.selected);
    return box ? this.#toScreen([(box.box[0] + box.box[2]) / 2, (box.box[1] + box.box[3]) / 2]) : null;
  }

  #pan(dx, dy) {
    this.view = { ...this.view, x: this.view.x + dx, y: this.view.y + dy, fits: false };
    this.#keepInSight();
    this.render();
  }

  #keepInSight() {
    const { clientWidth, clientHeight } = this.element;
    const width = this.photo.width * this.view.scale;
    const height = this.photo.height * this.view.scale;
    this.view.x = Math.min(Math.max(this.view.x, clientWidth / 3 - width), (2 * clientWidth) / 3);
    this.view.y = Math.min(Math.max(this.view.y, clientHeight / 3 - height), (2 * clientHeight) / 3);
  }

  #toPhoto(x, y) {
    return [(x - this.view.x) / this.view.scale, (y - this.view.y) / this.view.scale];
  }

  #toScreen([x, y]) {
    return [x * this.view.scale + this.view.x, y * this.view.scale + this.view.y];
  }

  // ---------------------------------------------------------------- drawing

  startDrawing() {
    const { clientWidth, clientHeight } = this.element;
    this.drawing = { from: null, at: this.#toPhoto(clientWidth / 2, clientHeight / 2), byKeys: false };
    this.element.classList.add("drawing");
    this.render();
  }

  stopDrawing() {
    this.drawing = null;
    this.element.classList.remove("drawing");
    this.render();
  }

  moveCross(dx, dy) {
    const [x, y] = this.drawing.at;
    this.drawing.at = [Math.min(Math.max(x + dx, 0), this.photo.width), Math.min(Math.max(y + dy, 0), this.photo.height)];
    this.drawing.byKeys = true;
    this.render();
  }

  /** Set a corner where the cross is; returns the box once there are two. */
  setCorner() {
    if (!this.drawing.from) {
      this.drawing.from = this.drawing.at;
      this.drawing.byKeys = true;
      this.render();
      return null;
    }
    const box = this.#drawn();
    this.stopDrawing();
    return box;
  }

  #drawn() {
    const { from, at } = this.drawing;
    return inside([...from, ...at].map((value) => Math.round(value * 10) / 10), this.photo);
  }

  #renderCross() {
    this.cross.hidden = !this.drawing;
    if (!this.drawing) return;
    const [x, y] = this.#toScreen(this.drawing.at);
    this.cross.style.setProperty("--x", `${x}px`);
    this.cross.style.setProperty("--y", `${y}px`);
  }

  // ---------------------------------------------------------------- pointers

  #at(event) {
    const { left, top } = this.element.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  /** What is under a point: {number, part}, part a side, a corner or "move"; the selected box first, then small ones. */
  #hit([px, py], reach) {
    const own = shownBoxes(this.photo).map((box) => {
      const [x1, y1, x2, y2] = this.boxOf(box);
      const [left, top] = this.#toScreen([x1, y1]);
      const [right, bottom] = this.#toScreen([x2, y2]);
      return { box, left, top, right, bottom, area: (right - left) * (bottom - top) };
    });
    own.sort((a, b) => (b.box.number === this.selected) - (a.box.number === this.selected) || a.area - b.area);
    for (const { box, left, top, right, bottom } of own) {
      if (px < left - reach || px > right + reach || py < top - reach || py > bottom + reach) continue;
      if (box.number !== this.selected) {
        if (px >= left && px <= right && py >= top && py <= bottom) return { number: box.number, part: "select" };
        continue;
      }
      const vertical = Math.abs(py - top) <= reach ? "n" : Math.abs(py - bottom) <= reach ? "s" : "";
      const horizontal = Math.abs(px - left) <= reach ? "w" : Math.abs(px - right) <= reach ? "e" : "";
      if (vertical || horizontal) return { number: box.number, part: vertical + horizontal };
      return { number: box.number, part: "move" };
    }
    return null;
  }

  #down(event) {
    if (!this.photo || event.target.closest("button") || event.button > 1) return;
    this.element.setPointerCapture(event.pointerId);
    const at = this.#at(event);
    this.pointers.set(event.pointerId, at);
    if (this.pointers.size === 2) {
      this.grab = { kind: "pinch", distance: this.#spread() };
      this.draft = null;
      return;
    }
    if (this.drawing) {
      this.drawing.from = this.drawing.at = this.#toPhoto(...at);
      this.grab = { kind: "draw", start: at };
    } else {
      const hit = event.button === 1 ? null : this.#hit(at, event.pointerType === "touch" ? 2 * EDGE : EDGE);
      const box = hit && this.photo.boxes.find((own) => own.number === hit.number);
      const isChange = hit && hit.part !== "select" && this.selected === hit.number;
      this.grab = { kind: isChange ? hit.part : "pan", hit, start: at, last: at, first: box && this.boxOf(box), travelled: 0 };
    }
    this.render();
  }

  #move(event) {
    const at = this.#at(event);
    if (!this.photo) return;
    if (!this.pointers.has(event.pointerId)) return this.#hover(event, at);
    this.pointers.set(event.pointerId, at);
    const { grab } = this;
    if (!grab) return undefined;
    if (grab.kind === "pinch") {
      const distance = this.#spread();
      this.zoom(distance / grab.distance, this.#middle());
      grab.distance = distance;
    } else if (grab.kind === "draw") {
      this.drawing.at = this.#toPhoto(...at);
      this.render();
    } else {
      grab.travelled = Math.max(grab.travelled, Math.hypot(at[0] - grab.start[0], at[1] - grab.start[1]));
      if (grab.travelled < CLICK) return undefined;
      if (grab.kind === "pan") {
        this.element.classList.add("panning");
        this.#pan(at[0] - grab.last[0], at[1] - grab.last[1]);
      } else {
        this.draft = { number: grab.hit.number, box: this.#dragged(grab, at) };
        this.render();
      }
      grab.last = at;
    }
    return undefined;
  }

  #dragged({ kind, start, first }, at) {
    const dx = (at[0] - start[0]) / this.view.scale;
    const dy = (at[1] - start[1]) / this.view.scale;
    if (kind === "move") return moved(first, dx, dy, this.photo);
    const [x1, y1, x2, y2] = first;
    const next = [
      kind.includes("w") ? x1 + dx : x1, kind.includes("n") ? y1 + dy : y1,
      kind.includes("e") ? x2 + dx : x2, kind.includes("s") ? y2 + dy : y2,
    ];
    return inside(next, this.photo);
  }

  #up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    const { grab } = this;
    this.element.classList.remove("panning");
    if (this.pointers.size) return;
    this.grab = null;
    if (!grab || grab.kind === "pinch" || event.type === "pointercancel") {
      this.draft = null;
      this.render();
    } else if (grab.kind === "draw") {
      this.#endDraw();
    } else if (grab.travelled < CLICK) {
      this.on.select(grab.hit ? grab.hit.number : null);
    } else if (this.draft) {
      const { number, box } = this.draft;
      this.draft = null;
      this.on.change(number, box);
    }
  }

  #endDraw() {
    const { from, at } = this.drawing;
    const isClick = Math.max(Math.abs(at[0] - from[0]), Math.abs(at[1] - from[1])) * this.view.scale < CLICK;
    if (isClick) {
      this.drawing.from = null;
      return void this.render();
    }
    const box = this.#drawn();
    this.stopDrawing();
    this.on.draw(box);
  }

  #hover(event, at) {
    if (this.drawing) {
      if (!this.drawing.byKeys) {
        this.drawing.at = this.#toPhoto(...at);
        this.#renderCross();
      }
      return;
    }
    const hit = this.#hit(at, EDGE);
    const kind = !hit ? "" : hit.part === "select" ? "over-box" : hit.part === "move" ? "move" : SIDES[hit.part];
    this.element.classList.remove("over-box", "move", "ew", "ns", "nwse", "nesw");
    if (kind) this.element.classList.add(kind);
  }

  #wheel(event) {
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0016)), this.#at(event));
  }

  #spread() {
    const [a, b] = [...this.pointers.values()];
    return Math.max(1, Math.hypot(a[0] - b[0], a[1] - b[1]));
  }

  #middle() {
    const [a, b] = [...this.pointers.values()];
    return [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
  }
}

function handle(side) {
  const part = document.createElement("i");
  part.className = "handle";
  part.style.left = side.includes("w") ? "0" : side.includes("e") ? "100%" : "50%";
  part.style.top = side.includes("n") ? "0" : side.includes("s") ? "100%" : "50%";
  return part;
}
