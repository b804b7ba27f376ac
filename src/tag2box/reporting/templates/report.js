(() => {
  const dialog = document.getElementById("lightbox");
  if (dialog && dialog.showModal) {
    const open = (tile) => { dialog.replaceChildren(tile.cloneNode(true)); dialog.showModal(); };
    document.querySelectorAll("main .tile, header .tile").forEach((tile) => {
      const photo = tile.querySelector(".photo");
      photo.tabIndex = 0;
      photo.classList.add("zoomable");
      photo.addEventListener("click", () => open(tile));
      photo.addEventListener("keydown", (e) => { if (e.key === "Enter") open(tile); });
    });
    dialog.addEventListener("click", () => dialog.close());
  }
  const sliders = document.querySelectorAll(".min-score");
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const recount = (tile) => {
    const shown = (kind) => tile.querySelectorAll(`.box.${kind}:not([hidden])`).length;
    const judged = tile.querySelector(".right, .wrong, .missed, .ignored");
    const words = judged
      ? ["right", "wrong", "missed"].map((kind) => `${shown(kind)}\u00a0${kind}`).join(" · ")
      : plural(shown("plain"), "detection");
    tile.querySelector("figcaption").textContent = words;
  };
  const filter = (least) => {
    const tiles = new Set();
    document.querySelectorAll("[data-score], [data-until]").forEach((box) => {
      const { score, until } = box.dataset;
      box.hidden = score !== undefined ? +score < least - 1e-9 : +until >= least - 1e-9;
      tiles.add(box.closest(".tile"));
    });
    tiles.forEach(recount);
    sliders.forEach((slider) => {
      slider.value = least;
      slider.nextElementSibling.textContent = least.toFixed(2);
    });
  };
  sliders.forEach((slider) => {
    slider.closest("li").hidden = false;
    slider.addEventListener("input", () => filter(+slider.value));
  });
  const hint = () => document.querySelectorAll(".scroll").forEach((box) => {
    box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1);
    box.classList.toggle("at-end", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
  });
  hint();
  addEventListener("resize", hint);
  document.querySelectorAll(".scroll").forEach((box) => box.addEventListener("scroll", hint, { passive: true }));
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", hint));
  document.querySelectorAll(".copy").forEach((button) => {
    if (!navigator.clipboard) return;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
      button.textContent = "Copied";
    });
  });
})();
