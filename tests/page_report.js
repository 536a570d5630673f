// What a reader would trip over on this page, as data. Evaluated in the page by test_book.py.
(async () => {
  document.querySelectorAll("details").forEach((folded) => (folded.open = true));
  await new Promise((done) => setTimeout(done, 200)); // the page looks at what was unfolded
  const shown = (element) => {
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) return false;
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.height > 1;
  };
  const name = (element) => {
    const id = element.id ? "#" + element.id : "";
    const classes = [...element.classList].map((c) => "." + c).join("");
    const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 50);
    return `${element.tagName.toLowerCase()}${id}${classes} "${text}"`;
  };

  // Wider than the screen, and not inside something that scrolls or cuts.
  const screen_width = SCREEN_WIDTH;
  const contained = (element) => {
    for (let e = element.parentElement; e && e !== document.body; e = e.parentElement) {
      if (getComputedStyle(e).overflowX !== "visible") {
        const box = e.getBoundingClientRect();
        if (box.right <= screen_width + 1 && box.left >= -1) return true;
      }
    }
    return false;
  };
  const hidden_drawer = (element) => {
    const drawer = element.closest("dialog, .bd-sidebar-primary, .bd-sidebar-secondary");
    return drawer && getComputedStyle(drawer).position === "fixed" && !drawer.matches("[open]");
  };
  const wide = [...document.body.querySelectorAll("*")].filter((element) => {
    if (!shown(element) || hidden_drawer(element)) return false;
    const box = element.getBoundingClientRect();
    return (box.right > screen_width + 1 || box.left < -1) && !contained(element);
  });

  // Contrast of every text with what lies behind it.
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const known = {};
  const colour = (text) => {
    if (!known[text]) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = text;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      known[text] = [r, g, b, a / 255];
    }
    return known[text];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const layer = colour(getComputedStyle(e).backgroundColor);
      layers.push(layer);
      if (layer[3] === 1) break;
    }
    const canvas_colour = colour(getComputedStyle(document.documentElement).colorScheme.includes("dark") ? "#121212" : "#ffffff");
    return layers.reverse().reduce((below, layer) => over(layer, below), canvas_colour);
  };
  const light = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const pale = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || seen.has(element)) continue;
    seen.add(element);
    if (element.closest("script, style, noscript, mjx-assistive-mml") || !shown(element)) continue;
    const style = getComputedStyle(element);
    const ink = colour(element instanceof SVGElement ? style.fill : style.color);
    const ground = behind(element instanceof SVGElement ? element.closest("svg").parentElement : element);
    const [a, b] = [light(over(ink, ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && parseInt(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) pale.push(`${ratio.toFixed(2)} ${name(element)}`);
  }

  const article = document.querySelector("article.bd-article") || document.body;
  const prose = article.cloneNode(true);
  prose.querySelectorAll("pre, code, script, style, mjx-container").forEach((e) => e.remove());
  const raw = prose.textContent.match(/\$[^$\n]*[\\^_][^$\n]*\$|\\\(|\\\[|\\frac|\\begin\{/g) || [];
  const formulas = [...article.querySelectorAll(".math")];

  // Tables and figures that end outside the column, in a box that does not say that it scrolls.
  const says_so = (element) => {
    for (let e = element; e && e !== article; e = e.parentElement) {
      if (e.hasAttribute("data-scrolls") && e.nextElementSibling?.matches(".scroll-cue")) return true;
    }
    return false;
  };
  const right = article.getBoundingClientRect().right;
  const ends = (element) => {
    const last = element.matches("table") ? [...element.querySelectorAll("tr")].map((r) => r.lastElementChild) : [element];
    return Math.max(...last.filter(Boolean).map((e) => e.getBoundingClientRect().right));
  };
  const clipped = [...article.querySelectorAll("table, img, figure svg")].filter(
    (element) => shown(element) && ends(element) > right + 1 && !says_so(element),
  );

  // Numbers of a cell's output, each under the next, that do not end under each other.
  const ragged = [...article.querySelectorAll("div.cell_output table td")].filter((cell) => {
    const place = (e) => e.parentElement.cells.length - e.cellIndex; // from the right, as cells may span rows at the left
    const column = [...cell.closest("table").querySelectorAll("td")].filter((e) => place(e) === place(cell));
    const told = column.map((e) => e.textContent.trim().replaceAll(/[,%]/g, "")).filter((text) => text !== "\u2014");
    const numbers = told.every((text) => text !== "" && Number.isFinite(Number(text)));
    return numbers && shown(cell) && getComputedStyle(cell).textAlign !== "right";
  });

  return {
    title: document.title,
    clipped: clipped.map(name),
    scrolling: [...article.querySelectorAll("*")]
      .filter((e) => shown(e) && getComputedStyle(e).overflowX === "auto" && e.scrollWidth > e.clientWidth + 1)
      .map(name),
    ragged: ragged.map((cell) => cell.textContent.trim()).slice(0, 8),
    theme: document.documentElement.dataset.theme,
    scroll_width: document.documentElement.scrollWidth,
    wide: wide.slice(0, 8).map(name),
    pale: pale.slice(0, 12),
    texts: seen.size,
    images: [...document.images].map((i) => ({
      source: i.getAttribute("src") || "",
      alt: i.getAttribute("alt"),
      broken: i.complete && i.naturalWidth === 0,
    })),
    formulas: formulas.length,
    unset_formulas: formulas.filter((f) => !f.querySelector("mjx-container svg")).map(name),
    wrong_formulas: [...article.querySelectorAll("[data-mml-node=merror]")].map(name),
    raw_formulas: raw,
    text: document.body.innerText,
  };
})()
