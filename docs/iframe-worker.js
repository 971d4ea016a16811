// Browsers start no worker from a file. In a site read from disk, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script src="${url}"></script>`;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.documentElement.append(this.frame);
      this.loaded.then(() => (this.frame.contentWindow.postMessage = (data) => this.deliver(this, data)));
    }
    postMessage(data) {
      this.loaded.then(() => this.deliver(this.frame.contentWindow, data));
    }
    deliver(target, message) {
      const data = structuredClone(message);
      setTimeout(() => target.onmessage?.({ data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
