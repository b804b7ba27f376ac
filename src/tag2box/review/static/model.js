// The photo under review as a value: what an action does to it is computed here at once, and confirmed by the server.

export const COLOURS = ["#2fd3c0", "#ffab3d", "#ff7ab8", "#6fb0ff", "#c4e538", "#c49bff", "#ff8a7a", "#52e08a", "#ffdf57", "#7fe3ff"];

export const colourOf = (classes, name) => COLOURS[Math.max(0, classes.indexOf(name)) % COLOURS.length];

/** A box in the form of the journal: corners, class, decision. */
export const sentBox = (box, changes = {}) => {
  const next = { ...box, ...changes };
  return [...next.box, next.name, next.decision];
};

/** The photo after an action {action, boxes: {number: sent box}}; undo returns to what this page has seen. */
export function applied(photo, action) {
  const revision = photo.revision + 1;
  const past = photo.past ?? [];
  const future = photo.future ?? [];
  const now = { boxes: photo.boxes, done: photo.done };
  if (action.action === "undo") {
    const back = past.at(-1) ?? now; // unknown here: the answer of the server shows it
    return { ...photo, ...back, revision, past: past.slice(0, -1), future: [...future, now], undo: photo.undo - 1, redo: photo.redo + 1 };
  }
  if (action.action === "redo") {
    const again = future.at(-1) ?? now;
    return { ...photo, ...again, revision, past: [...past, now], future: future.slice(0, -1), undo: photo.undo + 1, redo: photo.redo - 1 };
  }
  const boxes = photo.boxes.map((box) => changed(box, action.boxes?.[box.number]));
  const known = new Set(photo.boxes.map((box) => box.number));
  for (const [number, sent] of Object.entries(action.boxes ?? {})) {
    if (!known.has(Number(number))) boxes.push(changed({ number: Number(number), is_drawn: true }, sent));
  }
  const done = action.action === "done" || (photo.done && action.action !== "reopen");
  return { ...photo, boxes, done, revision, past: [...past, now], future: [], undo: photo.undo + 1, redo: 0 };
}

function changed(box, sent) {
  return sent ? { ...box, box: sent.slice(0, 4), name: sent[4], decision: sent[5] } : box;
}

/** The answer of the server, with what this page remembers for undo. */
export const confirmed = (photo, before) =>
  before && before.revision === photo.revision ? { ...photo, past: before.past, future: before.future } : photo;

export const isShown = (box) => !(box.is_drawn && box.decision === "rejected");
export const isObject = (box) => box.decision === "accepted" || (box.decision === "open" && !box.is_doubtful);
export const shownBoxes = (photo) => photo.boxes.filter(isShown);
export const nextNumber = (photo) => Math.max(-1, ...photo.boxes.map((box) => box.number)) + 1;

/** Tags of the photo that no box has. */
export const unboxedTags = (photo) => {
  const boxed = new Set(photo.boxes.filter(isObject).map((box) => box.name));
  return photo.tags.filter((tag) => !boxed.has(tag));
};

/** Classes in the order of the number keys: all of them if nine keys suffice, else those of the photo first. */
export function keyedClasses(classes, photo) {
  if (classes.length <= 9) return classes;
  return [...new Set([...photo.tags, ...photo.boxes.map((box) => box.name), ...classes])].slice(0, 9);
}

/** A box inside the photo, with sides of at least one pixel. */
export function inside([x1, y1, x2, y2], photo) {
  const [left, right] = range(x1, x2, photo.width);
  const [top, bottom] = range(y1, y2, photo.height);
  return [left, top, right, bottom];
}

function range(a, b, size) {
  let low = Math.min(Math.max(Math.min(a, b), 0), size);
  let high = Math.min(Math.max(Math.max(a, b), 0), size);
  if (high - low < 1) {
    high = Math.min(size, low + 1);
    low = Math.max(0, high - 1);
  }
  return [low, high];
}

/** A box moved as a whole; it stays inside the photo. */
export function moved([x1, y1, x2, y2], dx, dy, photo) {
  const x = Math.min(Math.max(dx, -x1), photo.width - x2);
  const y = Math.min(Math.max(dy, -y1), photo.height - y2);
  return [x1 + x, y1 + y, x2 + x, y2 + y];
}

export const sameBox = (a, b) => a.every((value, place) => value === b[place]);

const MINUTE = 60;
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(5, Math.round(seconds / 5) * 5)} s`;
  if (seconds < 90 * MINUTE) return `${Math.round(seconds / MINUTE)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
