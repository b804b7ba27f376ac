// Requests to the server, and the outbox: actions wait there until the server has stored them on disk.

export class Problem extends Error {
  constructor(message, status = 0, body = null) {
    super(message);
    this.status = status; // 0: the server cannot be reached
    this.body = body;
  }
}

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    throw new Problem("the server cannot be reached");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Problem(body?.problem ?? `the server answered ${response.status}`, response.status, body);
}

export const ask = async (path) => (await answer(path)).json();

export async function askImage(number, size) {
  return (await answer(`/api/photos/${number}/${size}.jpg`, { cache: "default" })).blob();
}

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export class Outbox {
  // on: stored(item, photo), conflict(item, problem), refused(item, problem), changed(state, waiting, text)
  constructor(name, on) {
    this.name = `outbox-${name}`;
    this.on = on;
    this.items = this.#kept();
    this.running = false;
    this.wake = null;
    if (this.items.length) this.#send();
  }

  get length() {
    return this.items.length;
  }

  has(number) {
    return this.items.some((item) => item.number === number);
  }

  add(number, action) {
    this.items.push({ number, body: { ...action, key: crypto.randomUUID() } });
    this.#keep();
    this.#send();
  }

  retry() {
    this.wake?.();
  }

  async #send() {
    if (this.running) return;
    this.running = true;
    let failures = 0;
    while (this.items.length) {
      const item = this.items[0];
      if (!failures) this.on.changed("busy", this.items.length, "");
      try {
        const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(item.body) };
        const response = await answer(`/api/photos/${item.number}/actions`, options);
        const photo = await response.json().catch(() => { throw new Problem("the answer was cut short"); });
        this.#drop((other) => other === item);
        failures = 0;
        this.on.stored(item, photo);
      } catch (problem) {
        if (!(problem instanceof Problem)) throw problem;
        if ([400, 404, 409, 413, 422].includes(problem.status)) {
          this.#drop((other) => other.number === item.number); // what follows was based on it
          (problem.status === 409 ? this.on.conflict : this.on.refused)(item, problem);
          continue;
        }
        failures += 1;
        const state = problem.status === 0 ? "gone" : problem.status === 403 || problem.status === 421 ? "closed" : "failing";
        this.on.changed(state, this.items.length, problem.message);
        await Promise.race([pause(Math.min(failures, 4)), new Promise((done) => { this.wake = done; })]);
      }
    }
    this.running = false;
    this.on.changed("saved", 0, "");
  }

  #drop(which) {
    this.items = this.items.filter((item) => !which(item));
    this.#keep();
  }

  #keep() {
    try {
      sessionStorage.setItem(this.name, JSON.stringify(this.items));
    } catch { /* without storage, the actions are kept until the page is closed */ }
  }

  #kept() {
    try {
      return JSON.parse(sessionStorage.getItem(this.name) ?? "[]");
    } catch {
      return [];
    }
  }
}
