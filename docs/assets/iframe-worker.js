// A page that was opened as a file may not start workers, and the search of this site is one. On such a page a hidden
// frame takes the worker's place: its script runs in there, and messages go from window to window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.scope = null; // the frame's window, once the script has run
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><body></body>";
      frame.addEventListener("load", () => this.fill(frame, address), { once: true });
      document.body.append(frame);
    }

    fill(frame, address) {
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.addEventListener("load", () => {
        this.scope = scope;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      script.src = address;
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.scope) {
        this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
      } else {
        this.waiting.push(data);
      }
    }
  };
}
