"use strict";

/*
 * The demo's pages: shows what a StreamFollower receives, and keeps it in the tab's sessionStorage
 * together with its position, so that a reload resumes where the page was.
 */

const SAVE_DELAY_MS = 250;
const RATE_WINDOW_MS = 2000;
const LATENCIES = 31;
const STATUS_WORDS = {
  connecting: "connecting",
  replaying: "catching up",
  live: "live",
  waiting: "reconnecting",
  refused: "refused",
};

/** What a tab has shown of a stream: its items, the offset of the first, and the epoch. */
class Saved {
  #key;
  #timer = null;
  first = 0;
  epoch = null;
  items = [];

  constructor(key) {
    this.#key = `pgstreams:${key}`;
    try {
      Object.assign(this, JSON.parse(sessionStorage.getItem(this.#key)));
    } catch {
      // Storage may be off; then a reload starts at 0.
    }
    addEventListener("pagehide", () => this.save());
  }

  get position() {
    return this.first + this.items.length;
  }

  clear(first = 0) {
    this.first = first;
    this.items = [];
  }

  saveSoon() {
    this.#timer ??= setTimeout(() => this.save(), SAVE_DELAY_MS);
  }

  save() {
    clearTimeout(this.#timer);
    this.#timer = null;
    const { first, epoch, items } = this;
    try {
      sessionStorage.setItem(this.#key, JSON.stringify({ first, epoch, items }));
    } catch {
      // Full or off: an older state, or none, is resumed from.
    }
  }
}

/** A mark where chunks are missing because they are no longer stored. */
function gapMark({ from, to }) {
  const mark = document.createElement("p");
  mark.className = "gap";
  mark.textContent = `Chunks ${from}–${to - 1} are no longer stored.`;
  return mark;
}

/** Tokens of a text, one after the other. */
class TextView {
  #box;

  constructor(box) {
    this.#box = box;
  }

  addGap(gap) {
    this.#box.append(gapMark(gap));
  }

  add(offset, items, isNew) {
    for (const text of items) {
      const token = document.createElement("span");
      token.textContent = text;
      if (isNew) token.className = "new";
      this.#box.append(token);
    }
  }

  clear() {
    this.#box.replaceChildren();
  }
}

/** Lines of a program's output, with their offsets and the seconds since the first. */
class LinesView {
  #box;
  #startedAt = null;
  #followsEnd = true;
  #top = 0;
  #frame = null;

  constructor(box) {
    this.#box = box;
    box.addEventListener("scroll", () => this.#scrolled());
  }

  add(offset, items) {
    this.#box.append(...items.map((item, index) => this.#line(offset + index, item)));
    // Once per painted frame: asking for the height makes the browser lay the page out.
    if (this.#followsEnd) this.#frame ??= requestAnimationFrame(() => this.#scrollToEnd());
  }

  /** Whoever scrolls up to read is left there, until back at the end. */
  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    if (scrollTop < this.#top) this.#followsEnd = false;
    if (scrollHeight - scrollTop - clientHeight < 40) this.#followsEnd = true;
    this.#top = scrollTop;
  }

  #scrollToEnd() {
    this.#frame = null;
    this.#box.scrollTop = this.#box.scrollHeight;
  }

  addGap(gap) {
    this.#box.append(gapMark(gap));
  }

  clear() {
    this.#box.replaceChildren();
    this.#startedAt = null;
  }

  #line(offset, { at, text }) {
    this.#startedAt ??= at;
    const line = document.createElement("div");
    line.className = /^\*\*\*|Error:/.test(text) ? "line bad" : "line";
    const cells = [
      ["offset", offset],
      ["seconds", (at - this.#startedAt).toFixed(2)],
      ["text", text],
    ];
    for (const [name, content] of cells) {
      const cell = document.createElement("span");
      cell.className = name;
      cell.textContent = content;
      line.append(cell);
    }
    return line;
  }
}

/** A bar of the offsets received, one segment for each connection that brought some. */
class Tape {
  #bar;
  #caption;
  #segments = [];

  constructor(bar, caption) {
    this.#bar = bar;
    this.#caption = caption;
  }

  add(source, from, to) {
    let last = this.#segments.at(-1);
    if (!last || last.source !== source) {
      const element = document.createElement("i");
      element.dataset.source = source === 0 ? "saved" : ((source - 1) % 4) + 1;
      this.#bar.append(element);
      last = { source, from, element };
      this.#segments.push(last);
    }
    last.to = to;
    last.element.style.flexGrow = to - last.from;
    this.#caption.textContent = this.#segments.map(Tape.#words).join(" · ");
  }

  clear() {
    this.#segments = [];
    this.#bar.replaceChildren();
    this.#caption.textContent = "";
  }

  static #words({ source, from, to }) {
    const where = source === 0 ? "kept in this tab" : `connection ${source}`;
    return to - from === 1 ? `${from} ${where}` : `${from}–${to - 1} ${where}`;
  }
}

class StreamPanel {
  #part;
  #key;
  #saved;
  #view;
  #tape;
  #follower;
  #arrivals = [];
  #latencies = [];

  constructor(panel) {
    this.#part = (name) => panel.querySelector(`[data-part="${name}"]`);
    this.#key = panel.dataset.stream;
    this.#saved = new Saved(this.#key);
    const content = this.#part("content");
    this.#view = panel.dataset.view === "lines" ? new LinesView(content) : new TextView(content);
    this.#tape = new Tape(this.#part("tape"), this.#part("tape-caption"));
    this.#follower = new StreamFollower(this.#key, {
      position: this.#saved.position,
      epoch: this.#saved.epoch,
      onStatus: (status, detail) => this.#showStatus(status, detail),
      onChunks: (chunks) => this.#showChunks(chunks),
      onReset: () => this.#startOver(),
      onGap: (gap) => this.#showGap(gap),
      onClosed: (end) => this.#showEnd(end),
      onError: ({ message }) => this.#showError(message),
    });
    panel.follower = this.#follower;
  }

  start() {
    const { items, first, position } = this.#saved;
    if (items.length > 0) {
      this.#view.add(first, items, false);
      this.#tape.add(0, first, position);
    }
    this.#part("drop").addEventListener("click", () => this.#follower.drop());
    this.#part("stop").addEventListener("submit", (event) => this.#stop(event));
    this.#figures();
    setInterval(() => this.#figures(), 100);
    this.#follower.start();
  }

  /** Cancel over the websocket; without one, let the form be posted. */
  #stop(event) {
    if (!this.#follower.cancel()) return;
    event.preventDefault();
    this.#part("stop").querySelector("button").disabled = true;
  }

  #showChunks({ offset, data }) {
    const isNew = this.#follower.status === "live";
    this.#measure(data, isNew);
    this.#view.add(offset, data, isNew);
    this.#tape.add(this.#follower.connections, offset, offset + data.length);
    this.#saved.items.push(...data);
    this.#saved.epoch = this.#follower.epoch;
    this.#saved.saveSoon();
  }

  /** Note when chunks came, and how long after the writer took the time: its clock is this one. */
  #measure(data, isNew) {
    const now = performance.now();
    for (const item of data) {
      this.#arrivals.push(now);
      if (isNew && item.at !== undefined) this.#latencies.push(Date.now() - item.at * 1000);
    }
    this.#latencies.splice(0, this.#latencies.length - LATENCIES);
  }

  #showStatus(status, { delay, code, message }) {
    const badge = this.#part("status");
    if (status === "finished") return; // showEnd knows how it ended
    badge.dataset.status = status;
    badge.textContent = STATUS_WORDS[status];
    const notes = {
      waiting: () => `Trying again in ${(delay / 1000).toFixed(1)} s, from offset ${this.#follower.position}.`,
      refused: () => [message || "The server ended the connection.", code && `(${code})`].filter(Boolean).join(" "),
    };
    this.#note(notes[status]?.() ?? "");
    if (status === "refused") this.#ended();
  }

  #showEnd({ state, reason }) {
    const badge = this.#part("status");
    badge.dataset.status = state;
    badge.textContent = state;
    this.#note(reason);
    this.#ended();
    const entry = this.#entry(".badge");
    if (entry) [entry.dataset.status, entry.textContent] = [state, state];
  }

  #ended() {
    this.#part("content").setAttribute("aria-busy", "false");
    this.#part("stop").hidden = true;
    this.#part("drop").hidden = true;
    this.#saved.save();
    this.#figures();
  }

  #showError(message) {
    this.#note(message);
    this.#part("stop").querySelector("button").disabled = false;
  }

  #showGap(gap) {
    this.#view.addGap(gap);
    this.#saved.clear(gap.to);
  }

  #startOver() {
    this.#view.clear();
    this.#tape.clear();
    this.#saved.clear();
  }

  #note(text) {
    this.#part("note").textContent = text;
  }

  /** A part of this stream's line in the list of earlier ones. */
  #entry(selector) {
    return document.querySelector(`[data-entry="${CSS.escape(this.#key)}"] ${selector}`);
  }

  #figures() {
    const since = performance.now() - RATE_WINDOW_MS;
    this.#arrivals = this.#arrivals.filter((at) => at > since);
    const rate = this.#arrivals.length / (RATE_WINDOW_MS / 1000);
    this.#figure(this.#part("position"), this.#follower.position);
    this.#figure(this.#entry(".count b"), this.#follower.position);
    this.#figure(this.#part("connections"), this.#follower.connections);
    this.#figure(this.#part("rate"), rate < 10 ? rate.toFixed(1) : rate.toFixed(0));
    if (this.#latencies.length > 0) {
      const sorted = [...this.#latencies].sort((a, b) => a - b);
      const median = Math.max(0, sorted[sorted.length >> 1]);
      this.#figure(this.#part("latency"), `${median.toFixed(median < 10 ? 1 : 0)} ms`);
    }
  }

  #figure(element, value) {
    if (element && element.textContent !== String(value)) element.textContent = value;
  }
}

for (const panel of document.querySelectorAll("[data-stream]")) new StreamPanel(panel).start();

// A question is sent with Enter, as people expect of such a box; Shift and Enter start a new line.
for (const box of document.querySelectorAll("textarea[name=prompt]")) {
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    box.form.requestSubmit();
  });
}
