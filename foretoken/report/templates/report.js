"use strict";
// Draws the tree of one iteration at a time, from the JSON of its trace. Text only ever becomes text nodes.
(() => {
  const element = (name, classes, text) => {
    const made = document.createElement(name);
    if (classes) made.className = classes;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const probability = (value) => (value === null || value === undefined ? "?" : value >= 0.1 ? value.toFixed(2) : String(value));

  const goOn = new Map(); // of each trace: goes some iterations on

  function show(section) {
    const data = JSON.parse(section.querySelector("script.data").textContent);
    const step = section.querySelector(".step"), text = section.querySelector(".text");
    const find = (selector) => step.querySelector(selector);
    const slider = find("input"), previous = find(".previous"), next = find(".next");
    const tokens = new Map();
    for (const token of text.querySelectorAll(".tok")) {
      const number = Number(token.dataset.i);
      if (!tokens.has(number)) tokens.set(number, []);
      tokens.get(number).push(token);
    }
    const mark = (number, name, on) => (tokens.get(number) || []).forEach((token) => token.classList.toggle(name, on));
    let current = -1, hovered = -1;

    function reasonOf(tree, node) {
      return tree.why[node] || data.outcomes[tree.outcome[node]][1];
    }

    function leafOf(tree, node) {
      const origin = data.origins[tree.origin[node]], outcome = data.outcomes[tree.outcome[node]][0];
      const leaf = element("button", "leaf o" + (node ? origin[1] : 0) + " " + outcome);
      leaf.type = "button";
      leaf.dataset.node = node;
      leaf.append(element("b", "", tree.text[node]));
      if (node) {
        const draft = tree.draft && tree.draft[node] !== null ? " · draft " + probability(tree.draft[node]) : "";
        leaf.append(element("small", "", "target " + probability(tree.target[node]) + draft));
        leaf.title = reasonOf(tree, node);
      } else {
        leaf.append(element("small", "", "root"));
      }
      return leaf;
    }

    function drawn(tree) {
      const kids = tree.parent.map(() => []);
      tree.parent.forEach((parent, node) => { if (node) kids[parent].push(node); });
      const boxes = tree.parent.map(() => null);
      for (let node = tree.parent.length - 1; node >= 0; node--) { // children stand behind their parents
        const box = element("div", "branch " + data.outcomes[tree.outcome[node]][0]);
        box.append(leafOf(tree, node));
        const below = element("div", "kids");
        for (const kid of kids[node]) below.append(boxes[kid]);
        if (node === tree.end && tree.next !== null) {
          const last = element("div", "branch accepted"), leaf = element("div", "leaf own");
          leaf.append(element("b", "", tree.next));
          const bonus = kids[node].length === 0;
          leaf.append(element("small", "", bonus ? "the target's own: bonus" : "the target's own: correction"));
          last.append(leaf);
          below.append(last);
        }
        if (below.children.length === 1) below.classList.add("only");
        if (below.children.length) box.append(below);
        boxes[node] = box;
      }
      return boxes[0];
    }

    function chooseNode(tree, node) {
      step.querySelectorAll(".leaf.chosen").forEach((leaf) => leaf.classList.remove("chosen"));
      const leaf = find('.leaf[data-node="' + node + '"]');
      if (leaf) leaf.classList.add("chosen");
      const by = node ? ", proposed by " + data.origins[tree.origin[node]][0] : "";
      const after = tree.own[node] === "-1" ? "" : " After it the target's own token is “" + tree.own[node] + "” (p = " + probability(tree.own_prob[node]) + ").";
      find(".node").textContent = "“" + tree.text[node] + "” (id " + tree.id[node] + ")" + by + ": " + reasonOf(tree, node) + "." + after;
    }

    function whyTable(tree) {
      const box = find(".why");
      box.replaceChildren();
      const nodes = Object.keys(tree.why);
      if (!nodes.length) return;
      const table = element("table");
      table.append(element("caption", "", "Tested and not accepted"));
      for (const node of nodes) {
        const row = table.insertRow();
        row.append(element("td", "", tree.text[node]), element("td", "", tree.why[node]));
      }
      box.append(table);
    }

    function choose(number, scrolls) {
      number = Math.min(Math.max(number, 0), data.iterations.length - 1);
      if (number < 0 || number === current) return;
      mark(current, "chosen", false);
      mark(number, "chosen", true);
      current = number;
      const it = data.iterations[number], tree = it.tree;
      find(".number").textContent = number + 1;
      slider.value = number + 1;
      previous.disabled = number === 0;
      next.disabled = number === data.iterations.length - 1;
      find(".facts").textContent = it.drafts + "; " + it.ms + " ms"
        + (tree ? ", rule " + tree.rule + ", root at position " + tree.position : "") + (it.note ? ". " + it.note : "");
      const written = find(".written");
      written.replaceChildren("Written: ");
      it.written.forEach((label, place) => written.append(element("span", "tok " + (place < it.accepted ? "o" + colourOf(number, place) : "o0"), label)));
      const box = find(".treebox");
      box.replaceChildren(tree ? drawn(tree) : element("p", "hint", "This iteration was not traced."));
      fit(box);
      find(".node").textContent = "";
      if (tree) whyTable(tree); else find(".why").replaceChildren();
      const first = (tokens.get(number) || [])[0];
      if (first && scrolls) {
        const top = first.getBoundingClientRect().top - text.getBoundingClientRect().top;
        if (top < 0 || top > text.clientHeight - 30) text.scrollTop += top - text.clientHeight / 3;
      }
    }

    function fit(box) {
      box.classList.remove("outline");
      box.classList.toggle("outline", box.scrollWidth > box.clientWidth);
    }

    function colourOf(number, place) {
      const token = (tokens.get(number) || [])[place];
      const found = token && /\bo(\d)\b/.exec(token.className);
      return found ? found[1] : "0";
    }

    const iterationOf = (event) => {
      const token = event.target.closest(".tok");
      return token && token.dataset.i !== undefined ? Number(token.dataset.i) : -1;
    };
    text.addEventListener("mouseover", (event) => {
      const number = iterationOf(event);
      if (number === hovered) return;
      mark(hovered, "hover", false);
      mark(number, "hover", true);
      hovered = number;
    });
    text.addEventListener("mouseleave", () => { mark(hovered, "hover", false); hovered = -1; });
    text.addEventListener("click", (event) => {
      const number = iterationOf(event);
      if (number < 0) return;
      choose(number, false);
      if (step.getBoundingClientRect().top > window.innerHeight * 0.8) step.scrollIntoView({ block: "start" });
    });
    find(".treebox").addEventListener("click", (event) => {
      const leaf = event.target.closest(".leaf[data-node]");
      if (leaf) chooseNode(data.iterations[current].tree, Number(leaf.dataset.node));
    });
    slider.addEventListener("input", () => choose(Number(slider.value) - 1, true));
    previous.addEventListener("click", () => choose(current - 1, true));
    next.addEventListener("click", () => choose(current + 1, true));
    window.addEventListener("resize", () => fit(find(".treebox")));
    goOn.set(section, (by) => choose(current + by, true));
    const drafted = data.iterations.findIndex((it) => it.accepted > 0);
    choose(Math.max(drafted, 0), true);
  }
  document.querySelectorAll("section.trace").forEach(show);

  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input") || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    // Of several traces the one that is used, else the one in the middle of the window.
    const inTheMiddle = [...goOn.keys()].find((section) => section.getBoundingClientRect().bottom > window.innerHeight / 2);
    const section = event.target.closest("section.trace") || inTheMiddle;
    if (!by || !section) return;
    goOn.get(section)(by);
    event.preventDefault();
  });
})();
