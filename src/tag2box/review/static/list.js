// The list of photos: only the rows that are visible exist, so 20,000 photos are as quick as 20.

const ROW = 64;
const AROUND = 4;
const THUMB_DELAY = 90; // milliseconds; rows that are scrolled past quickly load no thumbnail

export class PhotoList {
  constructor(element, onChoose) {
    this.element = element;
    this.space = element.querySelector("#rows-space");
    this.onChoose = onChoose;
    this.numbers = [];
    this.places = new Map();
    this.files = [];
    this.done = new Set();
    this.sampled = new Set();
    this.current = -1;
    this.rows = new Map();
    element.addEventListener("scroll", () => this.#soon(), { passive: true });
    element.addEventListener("click", (event) => {
      const row = event.target.closest(".photo-row");
      if (row) this.onChoose(Number(row.dataset.number));
    });
    new ResizeObserver(() => this.#soon()).observe(element);
  }

  show(numbers) {
    this.numbers = numbers;
    this.places = new Map(numbers.map((number, place) => [number, place]));
    this.space.style.height = `${numbers.length * ROW}px`;
    this.rows.forEach((row) => row.remove());
    this.rows.clear();
    this.render();
  }

  select(number) {
    this.current = number;
    const place = this.places.get(number);
    if (place === undefined) return this.render();
    const top = place * ROW;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop + ROW || top > scrollTop + clientHeight - 2 * ROW) {
      this.element.scrollTop = Math.max(0, top - clientHeight / 3);
    }
    return this.render();
  }

  #soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.render();
    });
  }

  render() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / ROW) - AROUND);
    const last = Math.min(this.numbers.length, first + Math.ceil(this.element.clientHeight / ROW) + 2 * AROUND);
    for (const [place, row] of this.rows) {
      if (place < first || place >= last) {
        row.remove();
        this.rows.delete(place);
      }
    }
    if (!this.element.clientHeight) return;
    for (let place = first; place < last; place += 1) this.#fill(place);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#thumbs(), THUMB_DELAY);
  }

  #fill(place) {
    const number = this.numbers[place];
    let row = this.rows.get(place);
    if (!row) {
      row = document.createElement("div");
      row.className = "photo-row";
      row.role = "option";
      row.dataset.number = number;
      row.id = `row-${number}`;
      row.style.top = `${place * ROW}px`;
      const text = document.createElement("div");
      text.append(document.createElement("b"), document.createElement("small"));
      const blank = document.createElement("span");
      blank.className = "blank";
      row.append(blank, text);
      row.ariaSetSize = String(this.numbers.length);
      row.ariaPosInSet = String(place + 1);
      this.rows.set(place, row);
      this.element.append(row);
    }
    const isDone = this.done.has(number);
    const name = this.files[number]?.split("/").at(-1) ?? `photo ${number + 1}`;
    row.querySelector("b").textContent = name;
    row.querySelector("small").textContent = isDone ? "✓ done" : `${place + 1}${this.sampled.has(number) ? " · sample" : ""}`;
    row.classList.toggle("done", isDone);
    row.ariaSelected = String(number === this.current);
    if (number === this.current) this.element.setAttribute("aria-activedescendant", row.id);
  }

  #thumbs() {
    for (const row of this.rows.values()) {
      const blank = row.querySelector(".blank");
      if (!blank) continue;
      const image = document.createElement("img");
      image.alt = "";
      image.decoding = "async";
      image.onerror = () => image.replaceWith(Object.assign(document.createElement("span"), { className: "blank gone" }));
      image.src = `/api/photos/${row.dataset.number}/thumb.jpg`;
      blank.replaceWith(image);
    }
  }
}
