// Search runs in a worker, and browsers start none from a disk. There a frame does the same work.
// (The theme would fetch such a script from elsewhere; it leaves that out where one of this name is given.)

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.ready = new Promise((resolve) => {
      this.frame.onload = () => {
        this.frame.onload = null;
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => load(inside, each)), Promise.resolve());
        load(inside, url).then(() => resolve(inside));
      };
    });
    document.body.append(this.frame);
  }

  postMessage(data) {
    this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

function load(inside, url) {
  return new Promise((resolve, reject) => {
    const script = inside.document.createElement("script");
    script.src = new URL(url, document.baseURI).href;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`cannot load ${url}`));
    inside.document.head.append(script);
  });
}

if (location.protocol === "file:") window.Worker = FrameWorker;
