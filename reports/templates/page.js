"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

  /* View A: what the pointer or the focus is on is read out below; arrow keys walk along and across the builds. */
  const readout = $("readout");
  for (const chart of document.querySelectorAll(".chart")) {
    const points = [...chart.querySelectorAll(".point")];
    const show = (point) => {
      readout.textContent = point.getAttribute("aria-label");
      readout.classList.add("on");
    };
    const neighbour = (point, key) => {
      const line = points.filter((each) => each.dataset.series === point.dataset.series);
      if (key === "ArrowLeft") return line[line.indexOf(point) - 1];
      if (key === "ArrowRight") return line[line.indexOf(point) + 1];
      const step = { ArrowUp: 1, ArrowDown: -1 }[key];
      if (!step) return undefined;
      const series = String(Number(point.dataset.series) + step);
      return points.filter((each) => each.dataset.series === series)[line.indexOf(point)];
    };
    for (const point of points) {
      point.addEventListener("pointerenter", () => show(point));
      point.addEventListener("focus", () => show(point));
      point.addEventListener("keydown", (event) => {
        const next = neighbour(point, event.key);
        if (!next) return;
        event.preventDefault();
        next.focus();
      });
    }
  }

  /* Detail B: the clock runs in milliseconds of the recording; everything on screen is a function of it. */
  if (!$("race")) return;
  const data = JSON.parse($("race-data").textContent);
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const CALM_INTERVAL_MS = 500;
  const panels = [...document.querySelectorAll(".lane")].map((lane) => ({
    lane,
    text: lane.querySelector(".text"),
    pace: lane.querySelector(".pace"),
    bar: lane.querySelector(".track i"),
    tokens: lane.querySelector(".tokens"),
    elapsed: lane.querySelector(".elapsed"),
    last: lane.querySelector(".last"),
  }));
  let runners = [];
  let clock = 0;
  let end = 0;
  let playing = false;
  let frame = 0;
  let previous = 0;
  let drawn = 0;

  const set = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };

  /* How many events had arrived at `ms`. */
  const arrived = (times, ms) => {
    let low = 0;
    let high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= ms) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  class Runner {
    constructor(panel, lane, fromRequest) {
      this.panel = panel;
      this.label = lane.label;
      this.lane = lane;
      const wait = fromRequest ? lane.wait : 0;
      this.times = (lane.t || []).map((ticks) => (ticks + wait) / data.ticksPerMs);
      this.totals = [0];
      for (const count of lane.n || []) this.totals.push(this.totals.at(-1) + count);
      this.end = this.times.at(-1) || 0;
      this.shown = 0;
      panel.text.replaceChildren();
      if (lane.reason) {
        const reason = document.createElement("span");
        reason.className = "reason";
        reason.textContent = `No speed: ${lane.reason}`;
        panel.text.append(reason);
      }
      set(panel.pace, lane.reason ? "no speed" : `${lane.median} ms/token`);
    }

    draw(ms) {
      if (this.lane.reason) {
        for (const field of ["tokens", "elapsed", "last"]) set(this.panel[field], "–");
        this.panel.bar.style.width = "0";
        return;
      }
      const now = Math.min(ms, this.end);
      const count = arrived(this.times, now);
      this.write(count);
      const before = arrived(this.times, now - 1000);
      set(this.panel.tokens, this.totals[count].toLocaleString("en"));
      set(this.panel.elapsed, `${(now / 1000).toFixed(2)} s`);
      set(this.panel.last, `${this.totals[count] - this.totals[before]} tok`);
      this.panel.bar.style.width = `${this.end ? (100 * now) / this.end : 100}%`;
    }

    write(count) {
      const box = this.panel.text;
      if (count === this.shown) return;
      if (count < this.shown) {
        box.replaceChildren();
        this.shown = 0;
      }
      const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      for (const old of box.querySelectorAll(".fresh")) old.classList.remove("fresh");
      const fragment = document.createDocumentFragment();
      for (let index = this.shown; index < count; index += 1) {
        const piece = document.createElement("span");
        piece.textContent = this.lane.text[index];
        if (index === count - 1 && count < this.times.length) piece.className = "fresh";
        fragment.append(piece);
      }
      box.append(fragment);
      this.shown = count;
      if (follows || playing) box.scrollTop = box.scrollHeight;
    }
  }

  const draw = () => {
    for (const runner of runners) runner.draw(clock);
    const slider = $("position");
    slider.value = String(end ? Math.round((1000 * clock) / end) : 1000);
    slider.setAttribute("aria-valuetext", `${(clock / 1000).toFixed(2)} seconds`);
  };

  const stop = () => {
    playing = false;
    cancelAnimationFrame(frame);
    set($("play"), "Play");
  };

  const finish = () => {
    stop();
    clock = end;
    draw();
    const results = runners.filter((runner) => !runner.lane.reason);
    const lines = results.map(
      (runner) => `${runner.label}: ${runner.totals.at(-1)} tokens in ${(runner.end / 1000).toFixed(2)} seconds`,
    );
    set($("race-status"), `${lines.join("; ")}.`);
  };

  const advance = () => {
    if (!playing) return;
    const now = performance.now(); // a frame's own timestamp is older by whatever held the frame up
    clock += (now - previous) * Number($("speed").value);
    previous = now;
    if (clock >= end) {
      finish();
      return;
    }
    if (!calm.matches || now - drawn >= CALM_INTERVAL_MS) {
      drawn = now;
      draw();
    }
    frame = requestAnimationFrame(advance);
  };

  const play = () => {
    if (clock >= end) clock = 0;
    playing = true;
    previous = performance.now();
    drawn = 0;
    set($("play"), "Pause");
    set($("race-status"), "");
    draw();
    frame = requestAnimationFrame(advance);
  };

  const load = () => {
    const race = data.races[Number($("depth").value)];
    const fromRequest = $("from-request").checked;
    runners = race.lanes.map((lane, index) => new Runner(panels[index], lane, fromRequest));
    end = Math.max(...runners.map((runner) => runner.end));
    const requests = [...new Set(race.lanes.filter((lane) => lane.request).map((lane) => lane.request))];
    const cut = race.lanes.some((lane) => lane.cut);
    set(
      $("race-caption"),
      `The recorded text of one request at ${race.depth} tokens of context, request ${requests.join(" and ")}, ` +
        `each token at the time it arrived${cut ? "; only the beginning of a long output" : ""}.`,
    );
    $("race-ids").hidden = !race.lanes.some((lane) => lane.ids);
  };

  const show = () => {
    const wasPlaying = playing;
    stop();
    load();
    if (wasPlaying) {
      clock = 0;
      play();
    } else {
      clock = end;
      draw();
    }
  };

  $("play").addEventListener("click", () => (playing ? stop() : play()));
  $("restart").addEventListener("click", () => {
    stop();
    clock = 0;
    play();
  });
  $("depth").addEventListener("change", show);
  $("from-request").addEventListener("change", show);
  $("position").addEventListener("input", () => {
    stop();
    clock = (end * Number($("position").value)) / 1000;
    draw();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && playing) stop();
  });
  $("controls").hidden = false;
  show();
})();
