"use strict";

/**
 * Follows one stream of django_pgstreams over a WebSocket (protocol pgstreams.v1): resumes from its
 * position after every loss, hands each offset over once and in order, and acknowledges it.
 *
 *   const follower = new StreamFollower("chat/17", {
 *     position: 0,                            // or "tail", or -20 for the last 20
 *     epoch: null,                            // of the life of the key that the position is from
 *     onChunks: ({ offset, data }) => {…},    // data[0] is the chunk at this offset
 *   });
 *   follower.start();
 *
 * Other handlers: onStatus(status, detail) with one of StreamFollower.STATUSES; onReset() when what
 * was shown is of another life of the key and must go; onGap({ from, to }) when chunks [from, to)
 * are no longer stored; onClosed({ state, reason, offset }); onError({ code, message, request }) when
 * something was refused, such as a "cancel", and the stream goes on.
 */
class StreamFollower {
  static PROTOCOL = "pgstreams.v1";
  static STALLED = 4408; // this page was asleep: the one close code of its kind that is not final
  static PASSES = ["internal", "unavailable", "stalled"]; // codes of errors that are worth another try
  static ASKS_FOR_TIME = [1012, 1013]; // the server restarts, or has too much to do
  static STATUSES = ["connecting", "replaying", "live", "waiting", "finished", "refused"];
  static FIRST_DELAY_MS = 250;
  static MAX_DELAY_MS = 10_000;
  static STABLE_MS = 10_000; // a connection that lasted so long has not failed
  static OPEN_TIMEOUT_MS = 10_000;
  static SILENCE_MS = 60_000; // more than two heartbeats of the server
  static ACK_DELAY_MS = 100;

  #key;
  #url;
  #handlers;
  #socket = null;
  #attempts = 0;
  #lastFrameAt = 0;
  #timers = { retry: null, silence: null, stable: null, ack: null };
  #done = false;

  /** The offset wanted next. */
  position;
  epoch;
  status = null;
  contentType = null;
  /** How often a subscription was confirmed: 1 while the first connection lasts. */
  connections = 0;

  constructor(key, { url = "/ws/streams/", position = 0, epoch = null, ...handlers } = {}) {
    this.#key = key;
    this.#url = new URL(url, location.href);
    this.#url.protocol = this.#url.protocol === "https:" ? "wss:" : "ws:";
    this.#handlers = handlers;
    this.position = position;
    this.epoch = epoch;
  }

  start() {
    addEventListener("online", this.#backOnline);
    document.addEventListener("visibilitychange", this.#backInView);
    this.#connect();
  }

  /** End for good: no more frames, no reconnecting. */
  stop() {
    this.#done = true;
    removeEventListener("online", this.#backOnline);
    document.removeEventListener("visibilitychange", this.#backInView);
    for (const timer of Object.values(this.#timers)) clearTimeout(timer);
    this.#abandon(1000);
  }

  /** Ask the server to cancel the stream. False when there is no connection to ask over. */
  cancel() {
    return this.#send({ type: "cancel", stream: this.#key });
  }

  /** Drop the connection, as a lost network would; it comes back by itself. */
  drop() {
    if (this.#socket && !this.#done) this.#lose();
  }

  // Connecting ----------------------------------------------------------------------------------

  #connect() {
    clearTimeout(this.#timers.retry);
    this.#setStatus("connecting");
    const socket = new WebSocket(this.#url, [StreamFollower.PROTOCOL]);
    this.#socket = socket;
    this.#expectFrame(StreamFollower.OPEN_TIMEOUT_MS);
    // A socket that was given up may still have events on their way.
    const ifCurrent = (handle) => (event) => socket === this.#socket && handle(event);
    socket.onopen = ifCurrent(() => this.#subscribe());
    socket.onmessage = ifCurrent((event) => this.#receive(JSON.parse(event.data)));
    socket.onclose = ifCurrent((event) => this.#closed(event));
  }

  #subscribe() {
    const frame = { type: "subscribe", stream: this.#key, offset: this.position };
    if (this.epoch !== null) frame.epoch = this.epoch;
    this.#send(frame);
  }

  #closed({ code, reason }) {
    if (code === 1000 || (code >= 4400 && code < 4500 && code !== StreamFollower.STALLED)) {
      this.#finish("refused", { code, message: reason });
    } else {
      if (StreamFollower.ASKS_FOR_TIME.includes(code)) this.#attempts = Math.max(this.#attempts, 6);
      this.#lose();
    }
  }

  /** Give the connection up, and try again after a delay that grows and differs from page to page. */
  #lose() {
    this.#abandon(4000);
    const longest = Math.min(
      StreamFollower.MAX_DELAY_MS,
      StreamFollower.FIRST_DELAY_MS * 2 ** this.#attempts++,
    );
    const delay = longest * (0.5 + Math.random() / 2);
    this.#timers.retry = setTimeout(() => this.#connect(), delay);
    this.#setStatus("waiting", { delay });
  }

  #abandon(code) {
    const socket = this.#socket;
    this.#socket = null;
    clearTimeout(this.#timers.silence);
    clearTimeout(this.#timers.stable);
    clearTimeout(this.#timers.ack);
    this.#timers.ack = null;
    if (socket) socket.close(code);
  }

  #backOnline = () => {
    // A connection made before the network went may look open for minutes.
    this.#abandon(4000);
    this.#attempts = 0;
    this.#connect();
  };

  #backInView = () => {
    if (document.visibilityState !== "visible") return;
    const silentFor = performance.now() - this.#lastFrameAt;
    if (!this.#socket || silentFor > StreamFollower.SILENCE_MS / 2) this.#backOnline();
  };

  /** Count the connection as lost unless a frame comes within this time. */
  #expectFrame(milliseconds) {
    clearTimeout(this.#timers.silence);
    this.#timers.silence = setTimeout(() => this.#lose(), milliseconds);
  }

  // Frames --------------------------------------------------------------------------------------

  #send(frame) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  #receive(frame) {
    this.#lastFrameAt = performance.now();
    this.#expectFrame(StreamFollower.SILENCE_MS);
    if (frame.stream !== undefined && frame.stream !== this.#key) return;
    switch (frame.type) {
      case "subscribed":
        return this.#subscribed(frame);
      case "chunks":
        return this.#chunks(frame);
      case "live":
        return this.#setStatus("live");
      case "gap":
        return this.#gap(frame);
      case "reset":
        return this.#reset(frame);
      case "closed":
        return this.#finish("finished", frame);
      case "error":
        return this.#error(frame);
      default: // "ping", and what later versions may add
    }
  }

  #subscribed(frame) {
    this.connections += 1;
    clearTimeout(this.#timers.stable);
    this.#timers.stable = setTimeout(() => (this.#attempts = 0), StreamFollower.STABLE_MS);
    // A position is of its own epoch until a reset says otherwise; that frame may yet be lost.
    this.epoch ??= frame.epoch;
    this.contentType = frame.content_type;
    // "tail" and negative positions become offsets, once.
    if (!(this.position >= 0)) this.position = frame.offset;
    this.#setStatus("replaying", { tail: frame.tail });
  }

  #chunks({ offset, next, data }) {
    if (offset > this.position) {
      this.#lose(); // never show a hole: ask again from the position
      return;
    }
    const fresh = data.slice(this.position - offset);
    if (fresh.length === 0) return;
    const first = this.position;
    this.position = next;
    this.#handlers.onChunks?.({ offset: first, data: fresh });
    this.#acknowledgeSoon();
  }

  #gap({ first }) {
    const from = this.position;
    this.position = Math.max(from, first);
    this.#handlers.onGap?.({ from, to: this.position });
  }

  #reset({ epoch }) {
    this.epoch = epoch;
    this.position = 0;
    this.#handlers.onReset?.();
  }

  #error({ code, message, request }) {
    // A frame that was not understood is answered without its name; the first one is "subscribe".
    request ??= this.status === "connecting" ? "subscribe" : undefined;
    if (request !== "subscribe") {
      this.#handlers.onError?.({ code, message, request }); // the subscription goes on
    } else if (StreamFollower.PASSES.includes(code)) {
      this.#lose();
    } else {
      this.#finish("refused", { code, message });
    }
  }

  #finish(status, detail) {
    this.#acknowledge();
    this.stop();
    this.#setStatus(status, detail);
    if (status === "finished") this.#handlers.onClosed?.(detail);
  }

  #acknowledgeSoon() {
    this.#timers.ack ??= setTimeout(() => this.#acknowledge(), StreamFollower.ACK_DELAY_MS);
  }

  #acknowledge() {
    if (this.#timers.ack === null) return;
    clearTimeout(this.#timers.ack);
    this.#timers.ack = null;
    this.#send({ type: "ack", stream: this.#key, offset: this.position });
  }

  #setStatus(status, detail = {}) {
    this.status = status;
    this.#handlers.onStatus?.(status, detail);
  }
}
