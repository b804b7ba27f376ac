// The panel beside the photo, and messages. Names of classes and files are always set as text, never as HTML.

import { colourOf, keyedClasses, sameBox, shownBoxes, unboxedTags } from "./model.js";

const byId = (id) => document.getElementById(id);

export function element(tag, className = "", text = null) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== null) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------- messages

export function say(text, { bad = false, quiet = false } = {}) {
  byId("live").textContent = text;
  if (quiet) return;
  const toast = element("p", bad ? "toast bad" : "toast", text);
  const toasts = byId("toasts");
  toasts.append(toast);
  while (toasts.children.length > 3) toasts.firstChild.remove();
  setTimeout(() => toast.remove(), bad ? 9000 : 2600);
}

export function banner(text, { bad = false } = {}) {
  const place = byId("banner");
  place.hidden = !text;
  place.textContent = text;
  place.classList.toggle("bad", bad);
}

// ---------------------------------------------------------------- the photo's tags and boxes

export function showPanel(photo, classes, selected, on) {
  byId("photo-name").textContent = photo.file;
  const marks = [];
  if (photo.done) marks.push(element("span", "done", "✓ done"));
  if (photo.sampled) marks.push(element("span", "sample", "random sample"));
  marks.push(...photo.reasons.map((reason) => element("span", "reason", reason)));
  byId("marks").replaceChildren(...marks);
  byId("classes").replaceChildren(...classChips(photo, classes, on));
  const boxes = shownBoxes(photo);
  byId("box-count").textContent = boxes.length ? `${boxes.length}, ${boxes.filter((box) => box.decision === "open").length} open` : "";
  const rows = boxes.map((box) => boxRow(box, classes, box.number === selected, on));
  byId("box-list").replaceChildren(...(rows.length ? rows : [element("li", "none", "No boxes. Press B to draw one, or Enter if there is nothing to box.")]));
  byId("box-list").querySelector(".selected")?.scrollIntoView({ block: "nearest" });
  byId("accept").disabled = byId("reject").disabled = selected === null;
  byId("swap").disabled = !boxes.some((box) => box.number === selected && box.alternative);
  byId("undo").disabled = !on.canUndo();
  byId("redo").disabled = !on.canRedo();
}

function classChips(photo, classes, on) {
  const missing = new Set(unboxedTags(photo));
  const keyed = keyedClasses(classes, photo);
  const chips = keyed.map((name, place) => {
    const item = element("li");
    const isTag = photo.tags.includes(name);
    const button = element("button", missing.has(name) ? "absent" : isTag ? "" : "other-class");
    button.type = "button";
    button.style.setProperty("--colour", colourOf(classes, name));
    button.append(element("kbd", "", String(place + 1)), element("i", "swatch"), element("span", "", missing.has(name) ? `${name}: no box` : name));
    button.title = isTag ? "tag of this photo" : photo.unsure.includes(name) ? "unsure tag" : "not a tag of this photo";
    button.ariaLabel = `Class ${name}, ${button.title}${missing.has(name) ? ", no box" : ""}`;
    button.onclick = () => on.classify(name);
    item.append(button);
    return item;
  });
  if (classes.length > keyed.length) {
    const item = element("li");
    const button = element("button", "other-class");
    button.type = "button";
    button.append(element("kbd", "", "0"), element("span", "", `${classes.length - keyed.length} more`));
    button.onclick = on.pick;
    item.append(button);
    chips.push(item);
  }
  return chips;
}

function boxRow(box, classes, isSelected, on) {
  const row = element("li", `${box.decision}${isSelected ? " selected" : ""}`);
  row.style.setProperty("--colour", colourOf(classes, box.name));
  const pick = element("button", "pick");
  pick.type = "button";
  const text = element("span");
  text.append(element("span", "name", box.name), element("small", "", describe(box)));
  pick.append(element("i", "swatch"), text);
  pick.setAttribute("aria-current", String(isSelected));
  pick.onclick = () => on.select(box.number);
  row.append(pick, icon("✕", "bad", "Reject", box, "rejected", on.reject), icon("✓", "good", "Accept", box, "accepted", on.accept));
  return row;
}

function icon(sign, kind, verb, box, decision, act) {
  const button = element("button", `icon ${kind}`, sign);
  button.type = "button";
  button.ariaLabel = `${verb} ${box.name}`;
  button.ariaPressed = String(box.decision === decision);
  button.onclick = () => act(box.number);
  return button;
}

export function describe(box) {
  const parts = [];
  if (box.is_drawn) parts.push("drawn");
  else {
    if (box.score !== null && box.score !== undefined) parts.push(box.score.toFixed(2));
    if (!sameBox(box.box, box.first) || box.name !== box.first_name) parts.push("corrected");
    parts.push(box.is_doubtful && box.decision === "open" ? "doubtful" : box.why);
    if (box.alternative) parts.push("part or whole?");
  }
  return parts.join(" · ");
}

// ---------------------------------------------------------------- progress

export function showProgress(text, share, total, done) {
  byId("progress-text").replaceChildren(...text);
  const bar = byId("bar");
  bar.ariaValueMax = String(total);
  bar.ariaValueNow = String(done);
  bar.firstElementChild.style.width = `${100 * share}%`;
}

export function showConnection(state, waiting) {
  const pill = byId("connection");
  pill.className = `pill ${{ saved: "ok", busy: "busy" }[state] ?? "gone"}`;
  pill.lastElementChild.textContent = state === "saved" ? "saved" : state === "busy" ? "saving" : `${waiting} not saved`;
}

// ---------------------------------------------------------------- choosing a class

export function openPicker(classes, onChoose) {
  const dialog = byId("picker");
  const text = byId("picker-text");
  let active = 0;
  let found = classes;
  const render = () => {
    const wanted = text.value.trim().toLowerCase();
    found = classes.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 200);
    active = Math.min(active, Math.max(0, found.length - 1));
    byId("picker-list").replaceChildren(...found.map((name, place) => {
      const item = element("li");
      const button = element("button", place === active ? "active" : "", name);
      button.type = "button";
      button.onclick = () => choose(name);
      item.append(button);
      return item;
    }));
    byId("picker-list").children[active]?.scrollIntoView({ block: "nearest" });
  };
  const choose = (name) => {
    dialog.close();
    onChoose(name);
  };
  text.value = "";
  text.oninput = () => { active = 0; render(); };
  text.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      active = Math.min(Math.max(active + step, 0), found.length - 1);
      render();
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (found[active] !== undefined) choose(found[active]);
    }
  };
  render();
  dialog.showModal();
  text.focus();
}
