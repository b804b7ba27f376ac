/* Web workers for pages opened from disk, where browsers refuse them: the script runs in a hidden frame instead.
   Material's search checks for the name IFrameWorker. */
(function () {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = (source) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = source;
        script.onload = resolve;
        script.onerror = () => reject(new Error(source));
        inside.document.body.appendChild(script);
      });
      inside.IFrameWorker = IFrameWorker;
      inside.importScripts = (...sources) => sources.reduce((done, source) => done.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.ready = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  }

  window.Worker = IFrameWorker;
})();
