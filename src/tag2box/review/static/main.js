// The review page: what keys and buttons do.

import { ask, askImage, Outbox } from "./client.js";
import { PhotoList } from "./list.js";
import {
  applied, confirmed, duration, inside, keyedClasses, moved, nextNumber, sameBox, sentBox, shownBoxes, unboxedTags,
} from "./model.js";
import { banner, element, openPicker, say, showConnection, showPanel, showProgress } from "./panel.js";
import { Stage } from "./stage.js";

const POLL = 4000; // milliseconds
const NUDGE_PAUSE = 500; // arrow keys within this many milliseconds are one action
const KEPT_PHOTOS = 12;
const AHEAD = 3;
const SCREEN = 1600; // pixels of the long side of a screen-size copy
const byId = (id) => document.getElementById(id);

const app = {
  set: null,
  numbers: [], // photos in the order of review
  current: -1,
  photos: new Map(), // number -> photo
  images: new Map(), // number -> promise of {url} or {problem}
  trail: { undo: [], redo: [] }, // photos of this tab's last actions
  filter: { order: "queue", name: "", low: 0, high: 1, open: false },
  position: 0,
  lastClass: null,
  turn: 0,
  nudge: null,
  connection: "saved",
};

const list = new PhotoList(byId("rows"), (number) => go(number));
const stage = new Stage(byId("stage"), {
  select: (number) => select(number),
  change: (number, box) => change("move", number, { box: rounded(box) }),
  draw: (box) => drawn(box),
  zoomed: () => sharpen(),
});
let outbox = null;

const photoNow = () => app.photos.get(app.current) ?? null;
const boxNow = () => photoNow()?.boxes.find((box) => box.number === stage.selected) ?? null;
const rounded = (box) => box.map((value) => Math.round(value * 100) / 100);

// ---------------------------------------------------------------- start

async function start() {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  const queue = ask("/api/queue");
  queue.catch(() => {});
  try {
    app.set = await ask("/api/set");
  } catch (problem) {
    return void banner(problem.status === 403 ? "Open the address that tag2box review printed." : `Cannot start: ${problem.message}`, { bad: true });
  }
  const { set } = app;
  document.title = `Review: ${set.name}`;
  byId("set-name").textContent = set.name;
  app.filter.order = set.order;
  app.position = set.position;
  stage.classes = set.classes;
  remember();
  outbox = new Outbox(set.digest, { stored, conflict, refused, changed: connection });
  if (set.notices.length) banner(set.notices.join(" · "));
  fillFilter();
  if (matchMedia("(max-width: 760px)").matches) toggleList(false);
  arrange(await queue);
  const wanted = Number.parseInt(location.hash.slice(1), 10);
  await go(app.numbers.includes(wanted) ? wanted : firstOpen() ?? app.numbers[0]);
  performance.mark("first-photo");
  byId("stage").focus({ preventScroll: true });
  poll();
  list.files = await ask("/api/files").catch(() => []);
  list.render();
}

function remember() {
  try {
    app.trail = JSON.parse(sessionStorage.getItem(`trail-${app.set.digest}`)) ?? app.trail;
  } catch { /* no storage: undo then knows the shown photo only */ }
}

function keepTrail() {
  try {
    sessionStorage.setItem(`trail-${app.set.digest}`, JSON.stringify({ undo: app.trail.undo.slice(-500), redo: app.trail.redo.slice(-500) }));
  } catch { /* as above */ }
}

async function load() {
  const { order, name, low, high } = app.filter;
  const query = new URLSearchParams({ order, low, high });
  if (name) query.set("name", name);
  arrange(await ask(`/api/queue?${query}`));
}

function arrange(found) {
  list.done = new Set(found.done);
  list.sampled = new Set(found.sampled);
  app.numbers = app.filter.open ? found.photos.filter((number) => !list.done.has(number)) : found.photos;
  list.show(app.numbers);
}

const firstOpen = () => app.numbers.find((number) => !list.done.has(number));

// ---------------------------------------------------------------- photos

async function fetchPhoto(number) {
  if (!app.photos.has(number)) app.photos.set(number, await ask(`/api/photos/${number}`));
  return app.photos.get(number);
}

function fetchImage(number, size = "screen") {
  const key = size === "screen" ? number : `${number}-${size}`;
  if (!app.images.has(key)) {
    const made = askImage(number, size).then(
      async (blob) => {
        const url = URL.createObjectURL(blob);
        const image = new Image();
        image.src = url;
        await image.decode().catch(() => {});
        return { url };
      },
      (problem) => ({ problem: problem.message, isGone: problem.status === 0 }),
    );
    app.images.set(key, made);
    forget(app.images, 2 * KEPT_PHOTOS);
  }
  return app.images.get(key);
}

function forget(map, most) {
  for (const [key, value] of map) {
    if (map.size <= most) return;
    if (key === app.current || outbox.has(key)) continue;
    map.delete(key);
    if (value.then) value.then((image) => image.url && URL.revokeObjectURL(image.url));
  }
}

async function go(number) {
  if (number === undefined || number < 0) return void say("There are no photos in this filter");
  flush();
  const turn = (app.turn += 1);
  app.current = number;
  list.select(number);
  history.replaceState(null, "", `#${number}`);
  const image = fetchImage(number);
  let photo;
  try {
    photo = await fetchPhoto(number);
  } catch (problem) {
    if (turn === app.turn) await unreachable(problem, () => go(number));
    return;
  }
  if (turn !== app.turn) return;
  const found = await image;
  if (turn !== app.turn) return;
  byId("problem").hidden = !found.problem;
  byId("problem").textContent = found.problem ?? "";
  stage.image.hidden = Boolean(found.problem);
  if (found.url) stage.image.src = found.url;
  if (found.problem) app.images.delete(number); // it may be back next time
  stage.selected = firstBox(photo);
  stage.show(photo);
  render();
  document.body.dataset.shown = number;
  performance.mark("photo-shown", { detail: number });
  const place = app.numbers.indexOf(number);
  say(`Photo ${place + 1} of ${app.numbers.length}, ${photo.file}: ${shownBoxes(photo).length} boxes${photo.done ? ", done" : ""}`, { quiet: true });
  if (found.isGone) return void unreachable({ status: 0, message: found.problem }, () => go(number));
  setTimeout(() => prefetch(place), 0);
}

function prefetch(place) {
  forget(app.photos, KEPT_PHOTOS);
  const next = nextOpen();
  const wanted = new Set([next, ...app.numbers.slice(place + 1, place + 1 + AHEAD), app.numbers[place - 1]]);
  for (const number of wanted) {
    if (number === undefined) continue;
    fetchPhoto(number).catch(() => {});
    fetchImage(number);
  }
}

async function unreachable(problem, again) {
  connection(problem.status === 403 ? "closed" : "gone", outbox.length, problem.message);
  await new Promise((done) => setTimeout(done, 1500));
  outbox.retry();
  if (photoNow() === null || !byId("problem").hidden) await again();
}

async function sharpen() {
  const photo = photoNow();
  const { scale } = stage.view;
  if (!photo || Math.max(photo.width, photo.height) <= SCREEN) return;
  if (scale * Math.max(photo.width, photo.height) * devicePixelRatio < 1.3 * SCREEN) return;
  const { turn } = app;
  const found = await fetchImage(app.current, "full");
  if (turn === app.turn && found.url) stage.image.src = found.url;
}

const firstBox = (photo) => {
  const boxes = shownBoxes(photo);
  return (boxes.find((box) => box.decision === "open" && !box.is_doubtful) ?? boxes[0])?.number ?? null;
};

function nextOpen(from = app.current) {
  const place = app.numbers.indexOf(from);
  const rest = [...app.numbers.slice(place + 1), ...app.numbers.slice(0, Math.max(place, 0))];
  return rest.find((number) => !list.done.has(number));
}

function step(by) {
  const place = app.numbers.indexOf(app.current) + by;
  if (place < 0 || place >= app.numbers.length) return say(by > 0 ? "This is the last photo" : "This is the first photo");
  return go(app.numbers[place]);
}

function render() {
  const photo = photoNow();
  if (!photo) return;
  showPanel(photo, app.set.classes, stage.selected, handlers);
  stage.render();
}

// ---------------------------------------------------------------- actions

function act(kind, boxes = {}, number = app.current) {
  const photo = app.photos.get(number);
  if (!photo) return;
  const action = { action: kind, boxes };
  app.photos.set(number, applied(photo, action));
  if (kind !== "undo" && kind !== "redo") {
    app.trail.undo.push(number);
    app.trail.redo = [];
    keepTrail();
  }
  outbox.add(number, { ...action, based_on: photo.revision });
  mark(number);
  if (number === app.current) {
    stage.show(photoNow(), { keepView: true });
    render();
  }
}

function mark(number) {
  if (app.photos.get(number).done) list.done.add(number);
  else list.done.delete(number);
  list.render();
  showCounts();
}

function change(kind, number, changes) {
  const box = photoNow().boxes.find((own) => own.number === number);
  const isTouched = kind !== "accept" && kind !== "reject";
  const next = { ...box, ...changes, ...(isTouched ? { decision: "accepted" } : {}) };
  if (sameBox(next.box, box.box) && next.name === box.name && next.decision === box.decision) return;
  act(kind, { [number]: sentBox(next) });
}

function select(number) {
  flush();
  stage.selected = number;
  render();
  const box = boxNow();
  if (box) say(`${box.name}, ${box.decision}${box.is_doubtful ? ", doubtful" : ""}${box.alternative ? ", part or whole?" : ""}`, { quiet: true });
}

function decide(kind, number = stage.selected) {
  flush();
  if (number === null) return void say("Select a box first: Tab, or a click");
  stage.selected = number;
  const { name } = boxNow();
  change(kind, number, { decision: kind === "accept" ? "accepted" : "rejected" });
  const rest = shownBoxes(photoNow());
  const place = rest.findIndex((box) => box.number >= number);
  const open = [...rest.slice(Math.max(place, 0)), ...rest.slice(0, Math.max(place, 0))].find((box) => box.decision === "open" && box.number !== number);
  stage.selected = open?.number ?? (rest.some((box) => box.number === number) ? number : rest[0]?.number ?? null);
  render();
  say(`${name} ${kind === "accept" ? "accepted" : "rejected"}`, { quiet: true });
}

async function finish() {
  flush();
  const photo = photoNow();
  if (!photo) return;
  if (byId("problem").hidden) {
    const missing = unboxedTags(photo);
    if (!photo.done) act("done");
    if (missing.length) say(`Done, without a box of ${missing.join(", ")}; Z goes back`);
    else say("Done", { quiet: true });
  }
  const next = nextOpen();
  if (next === undefined) say("All photos of this filter are done");
  else await go(next);
}

function classify(name) {
  flush();
  const box = boxNow();
  if (!box) return void say("Select a box first: Tab, or a click");
  app.lastClass = name;
  change("class", box.number, { name });
  say(`Class ${name}`, { quiet: true });
  return undefined;
}

function swap() {
  flush();
  const box = boxNow();
  if (!box?.alternative) return void say("This box has no other candidate");
  const isOther = sameBox(box.box, box.alternative);
  change("swap", box.number, { box: isOther ? box.first : within(box.alternative) });
  say(isOther ? "The first candidate again" : "The other candidate: part or whole", { quiet: true });
  return undefined;
}

const within = (box) => (sameBox(inside(box, photoNow()), box) ? box : inside(box, photoNow()));

function drawn(box) {
  const photo = photoNow();
  const number = nextNumber(photo);
  const name = unboxedTags(photo)[0] ?? app.lastClass ?? boxNow()?.name ?? photo.tags[0] ?? app.set.classes[0];
  mode("");
  act("draw", { [number]: [...rounded(box), name, "accepted"] });
  stage.selected = number;
  render();
  say(`New box: ${name}. Number keys change its class`);
}

function draw() {
  flush();
  if (stage.drawing) return void cancel();
  stage.startDrawing();
  mode("Drag a box, or move the cross with the arrows and press Enter at two corners. Esc cancels.");
  byId("stage").focus({ preventScroll: true });
  return undefined;
}

function mode(text) {
  byId("mode").hidden = !text;
  byId("mode").textContent = text;
  if (text) say(text, { quiet: true });
}

function cancel() {
  if (stage.drawing) {
    stage.stopDrawing();
    mode("");
  } else select(null);
}

function nudge(dx, dy, isResize) {
  const box = boxNow();
  if (!box) return;
  const before = stage.boxOf(box);
  const next = isResize ? inside([before[0], before[1], Math.max(before[2] + dx, before[0] + 1), Math.max(before[3] + dy, before[1] + 1)], photoNow()) : moved(before, dx, dy, photoNow());
  stage.draft = { number: box.number, box: next };
  stage.render();
  clearTimeout(app.nudge);
  app.nudge = setTimeout(flush, NUDGE_PAUSE);
}

/** Finish what the arrow keys began. */
function flush() {
  clearTimeout(app.nudge);
  const { draft } = stage;
  if (!draft || stage.grab) return;
  stage.draft = null;
  change("move", draft.number, { box: rounded(draft.box) });
  say("Box moved", { quiet: true });
}

async function undo(kind) {
  flush();
  const [from, to] = kind === "undo" ? [app.trail.undo, app.trail.redo] : [app.trail.redo, app.trail.undo];
  const number = from.pop() ?? app.current;
  if (number !== app.current) await go(number);
  const photo = app.photos.get(number);
  if (!photo?.[kind]) return void say(kind === "undo" ? "Nothing to undo" : "Nothing to redo");
  to.push(number);
  keepTrail();
  act(kind, {}, number);
  if (!shownBoxes(photoNow()).some((box) => box.number === stage.selected)) stage.selected = firstBox(photoNow());
  render();
  say(kind === "undo" ? "Undone" : "Done again");
  return undefined;
}

function reopen() {
  if (!photoNow()?.done) return void say("This photo is open");
  act("reopen");
  say("Open again");
  return undefined;
}

function nextBox(by) {
  const boxes = shownBoxes(photoNow() ?? { boxes: [] });
  const place = boxes.findIndex((box) => box.number === stage.selected);
  const next = place < 0 ? (by > 0 ? 0 : boxes.length - 1) : place + by;
  if (!boxes[next]) return false;
  select(boxes[next].number);
  return true;
}

// ---------------------------------------------------------------- answers of the server

function stored(item, photo) {
  if (outbox.has(item.number)) return;
  const before = app.photos.get(item.number);
  app.photos.set(item.number, confirmed(photo, before));
  mark(item.number);
  if (item.number !== app.current || stage.grab) return;
  const { draft } = stage;
  stage.show(photoNow(), { keepView: true });
  stage.draft = draft;
  if (stage.selected !== null && !shownBoxes(photoNow()).some((box) => box.number === stage.selected)) stage.selected = firstBox(photoNow());
  render();
}

function conflict(item, problem) {
  adopt(item.number, problem.body.photo);
  say(`${photoName(item.number)}: ${problem.message}`, { bad: true });
}

function refused(item, problem) {
  say(`${photoName(item.number)}: ${problem.message}`, { bad: true });
  ask(`/api/photos/${item.number}`).then((photo) => adopt(item.number, photo), () => {});
}

function adopt(number, photo) {
  app.photos.set(number, photo);
  app.trail.undo = app.trail.undo.filter((own) => own !== number);
  mark(number);
  if (number !== app.current) return;
  stage.selected = firstBox(photo);
  stage.show(photo, { keepView: true });
  render();
}

const photoName = (number) => list.files[number] ?? `photo ${number + 1}`;

function connection(state, waiting, text = "") {
  document.body.dataset.waiting = waiting;
  showConnection(state, waiting);
  if (state === "busy") return;
  const kept = waiting ? ` ${waiting} ${waiting === 1 ? "action is" : "actions are"} kept here and sent when it is back.` : "";
  if (state === "gone") banner(`The review server cannot be reached. Start it again: tag2box review ${app.set.folder} --port ${location.port}.${kept}`, { bad: true });
  else if (state === "closed") banner(`The review was started again: open the new address that it printed, in another tab.${kept}`, { bad: true });
  else if (state === "failing") banner(`Not stored: ${text}.${kept}`, { bad: true });
  else if (app.connection !== "saved") {
    banner("");
    say("The server is back, everything is stored");
  }
  app.connection = state;
}

async function poll() {
  clearTimeout(app.timer);
  try {
    const now = await ask(`/api/progress?since=${app.position}`);
    app.position = now.position;
    app.progress = now;
    for (const [number, revision, isDone] of now.changed) news(number, revision, isDone);
    list.render();
    showCounts();
    if (!outbox.length) connection("saved", 0);
    else outbox.retry();
  } catch (problem) {
    connection(problem.status === 0 ? "gone" : problem.status === 403 || problem.status === 421 ? "closed" : "failing", outbox.length, problem.message);
  }
  app.timer = setTimeout(poll, document.hidden ? 4 * POLL : POLL);
}

/** Another tab or reviewer may have changed a photo. */
function news(number, revision, isDone) {
  const known = app.photos.get(number);
  if (outbox.has(number) || (known && known.revision >= revision)) return;
  if (isDone) list.done.add(number);
  else list.done.delete(number);
  if (!known) return;
  app.photos.delete(number);
  if (number === app.current) {
    ask(`/api/photos/${number}`).then((photo) => {
      adopt(number, photo);
      say("Another reviewer has changed this photo; it is shown as it is now", { bad: true });
    }, () => {});
  }
}

function showCounts() {
  const { progress } = app;
  if (!progress) return;
  const done = list.done.size;
  const sample = [...list.sampled].filter((number) => list.done.has(number)).length;
  const left = progress.total - done;
  const text = [element("b", "", done.toLocaleString("en")), ` of ${progress.total.toLocaleString("en")} done · sample ${sample} of ${list.sampled.size.toLocaleString("en")}`];
  if (progress.pace && left) text.push(` · about ${duration(progress.pace * left)} left`);
  showProgress(text, done / progress.total, progress.total, done);
}

// ---------------------------------------------------------------- filter, list

function fillFilter() {
  const options = ["", ...app.set.classes].map((name) => Object.assign(element("option", "", name || "All classes"), { value: name }));
  byId("filter-class").replaceChildren(...options);
  byId("filter-order").value = app.filter.order;
}

async function applyFilter(filter) {
  byId("filter").close();
  flush();
  app.filter = filter;
  try {
    await load();
  } catch (problem) {
    return void say(problem.message, { bad: true });
  }
  say(`${app.numbers.length.toLocaleString("en")} photos`);
  byId("show-filter").classList.toggle("main", Boolean(filter.name) || filter.low > 0 || filter.high < 1 || filter.open);
  return void await go(app.numbers.includes(app.current) && !list.done.has(app.current) ? app.current : firstOpen() ?? app.numbers[0]);
}

function chosenFilter() {
  const share = (id, otherwise) => {
    const value = Number.parseFloat(byId(id).value);
    return Number.isFinite(value) ? Math.min(Math.max(value, 0), 1) : otherwise;
  };
  return { order: byId("filter-order").value, name: byId("filter-class").value, low: share("filter-low", 0), high: share("filter-high", 1), open: byId("filter-open").checked };
}

function resetFilter() {
  byId("filter-order").value = app.set.order;
  byId("filter-class").value = "";
  byId("filter-low").value = 0;
  byId("filter-high").value = 1;
  byId("filter-open").checked = false;
  applyFilter(chosenFilter());
}

function toggleList(isShown = document.querySelector("main").classList.contains("no-list")) {
  document.querySelector("main").classList.toggle("no-list", !isShown);
  byId("show-list").ariaExpanded = String(isShown);
  list.select(app.current);
}

const pick = () => (boxNow() ? openPicker(app.set.classes, classify) : say("Select a box first: Tab, or a click"));

const handlers = {
  select,
  classify,
  pick,
  accept: (number) => decide("accept", number),
  reject: (number) => decide("reject", number),
  canUndo: () => app.trail.undo.length > 0 || Boolean(photoNow()?.undo),
  canRedo: () => app.trail.redo.length > 0 || Boolean(photoNow()?.redo),
};

// ---------------------------------------------------------------- keys and buttons

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = {
  a: () => decide("accept"), x: () => decide("reject"), Delete: () => decide("reject"), Backspace: () => decide("reject"),
  n: () => step(1), j: () => step(1), p: () => step(-1), k: () => step(-1), s: swap, b: draw, r: reopen, z: () => undo("undo"), Z: () => undo("redo"),
  y: () => undo("redo"), l: () => toggleList(), o: () => byId("filter").showModal(), "?": () => byId("help").showModal(), "+": () => stage.zoom(1.4), "=": () => stage.zoom(1.4),
  "-": () => stage.zoom(1 / 1.4), f: () => stage.fit(), 0: pick, Escape: cancel,
};

function arrow(event) {
  const [dx, dy] = ARROWS[event.key];
  const by = event.altKey ? 10 : 1;
  if (stage.drawing) stage.moveCross(dx * by * (event.shiftKey ? 50 : 1), dy * by * (event.shiftKey ? 50 : 1));
  else nudge(dx * by, dy * by, event.shiftKey);
}

function enter() {
  if (!stage.drawing) return finish();
  const box = stage.setCorner();
  return box ? drawn(box) : mode("First corner set: move the cross, press Enter at the second.");
}

function isControl(target) {
  return target.closest("button, select, input, a, dialog") !== null;
}

/** What a key does; false if the browser should handle it. */
function press(event) {
  const { key, target } = event;
  const isCommand = event.ctrlKey || event.metaKey;
  if (target.closest("input, select")) return false;
  if (isCommand) {
    if (key.toLowerCase() === "z") undo(event.shiftKey ? "redo" : "undo");
    else if (key.toLowerCase() === "y") undo("redo");
    else return false;
    return true;
  }
  if (key in ARROWS) return target.closest("#rows") ? (step(key === "ArrowDown" || key === "ArrowRight" ? 1 : -1), true) : (arrow(event), true);
  if (key === "Tab") return target.closest("#stage") && !isControl(target) ? nextBox(event.shiftKey ? -1 : 1) : false;
  if (key === "Enter" || key === " ") return isControl(target) ? false : (enter(), true);
  if (event.altKey) return false;
  if (/^[1-9]$/.test(key)) {
    const name = keyedClasses(app.set.classes, photoNow())[Number(key) - 1];
    if (name !== undefined) classify(name);
    return true;
  }
  const run = KEYS[key] ?? KEYS[key.length === 1 && !event.shiftKey ? key.toLowerCase() : ""];
  if (!run) return false;
  run();
  return true;
}

document.addEventListener("keydown", (event) => {
  if (!photoNow() || document.querySelector("dialog[open]")) return;
  if (press(event)) event.preventDefault();
});

const BUTTONS = {
  previous: () => step(-1), next: () => step(1), undo: () => undo("undo"), redo: () => undo("redo"), draw, swap,
  reject: () => decide("reject"), accept: () => decide("accept"), finish, "show-list": () => toggleList(),
  "show-help": () => byId("help").showModal(), "show-filter": () => byId("filter").showModal(),
  "zoom-in": () => stage.zoom(1.4), "zoom-out": () => stage.zoom(1 / 1.4), "zoom-fit": () => stage.fit(),
  "filter-apply": () => applyFilter(chosenFilter()), "filter-reset": resetFilter,
};
for (const [id, run] of Object.entries(BUTTONS)) {
  byId(id).addEventListener("click", (event) => {
    run();
    const isPointer = event.detail > 0; // the keys then go to the photo; a keyboard user stays at the button
    if (isPointer && byId(id).closest(".actions")) byId("stage").focus({ preventScroll: true });
  });
}

addEventListener("beforeunload", (event) => {
  flush();
  if (outbox?.length) event.preventDefault();
});

start();
