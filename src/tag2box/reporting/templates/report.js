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
  document.querySelectorAll(".copy").forEach((button) => {
    if (!navigator.clipboard) return;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
      button.textContent = "Copied";
    });
  });
})();
