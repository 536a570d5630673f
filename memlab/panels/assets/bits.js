// A number in every format: its bits, what is stored, and the error. Used by memlab.bits.Explorer.
(() => {
  "use strict";
  const FORMATS = /* formats */;
  const PICKS = ["0.1", "1/3", "1+2^-8", "300", "65504", "65520", "1e-8", "-2^-24", "448", "1e39", "inf", "nan"];

  const biasOf = (format) => 2 ** (format.exponent - 1) - 1;
  const sizeOf = (format) => 1 + format.exponent + format.mantissa;

  function rounded(q, ties) {
    const down = Math.floor(q), rest = q - down;
    if (rest !== 0.5) return rest < 0.5 ? down : down + 1;
    return ties === "away" || down % 2 === 1 ? down + 1 : down;
  }

  // The exponent of a positive finite number, read off its 64 bits; a subnormal one reads -1023.
  function exponentOf(x) {
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, x);
    return ((view.getUint16(0) >> 4) & 0x7ff) - 1023;
  }

  // Codes of the largest number, of infinity and of NaN without their sign; null where there is none.
  function landmarks(format) {
    const all = 2 ** (sizeOf(format) - 1) - 1, one = 2 ** format.mantissa;
    if (format.special === "ieee") return { largest: all - one, infinity: all - one + 1, nan: all - one + 1 + one / 2 };
    if (format.special === "nan") return { largest: all - 1, infinity: null, nan: all };
    return { largest: all, infinity: null, nan: null };
  }

  // The distance between two neighbours at x, a power of two.
  function stepAt(format, x) {
    if (!format.exponent) return 1;
    const exponent = Math.max(exponentOf(Math.abs(x)), 1 - biasOf(format));
    return 2 ** (exponent - format.mantissa);
  }

  // The code of the nearest number of the format, an integer; null for NaN where it has none.
  function encode(format, x) {
    const { largest, infinity, nan } = landmarks(format);
    if (Number.isNaN(x)) return nan;
    const top = 2 ** (sizeOf(format) - 1);
    if (!format.exponent) {
      const n = Math.min(rounded(Math.abs(x), format.ties), x < 0 ? top : largest);
      return x < 0 && n > 0 ? 2 * top - n : n;
    }
    const sign = x < 0 || Object.is(x, -0) ? top : 0;
    let code = Infinity;
    if (Number.isFinite(x)) {
      const exponent = Math.max(exponentOf(Math.abs(x)), 1 - biasOf(format));
      const steps = rounded(Math.abs(x) / 2 ** (exponent - format.mantissa), format.ties);
      code = (exponent + biasOf(format) - 1) * 2 ** format.mantissa + steps; // a carry is right by itself
    }
    if (code > largest) code = format.overflow === "infinity" ? infinity : largest;
    return sign + code;
  }

  // The number that a code stands for.
  function decode(format, code) {
    const top = 2 ** (sizeOf(format) - 1);
    if (!format.exponent) return code < top ? code : code - 2 * top;
    const sign = code < top ? 1 : -1, size = code % top, { largest, infinity } = landmarks(format);
    if (size > largest) return size === infinity ? sign * Infinity : NaN;
    const field = Math.floor(size / 2 ** format.mantissa), rest = size % 2 ** format.mantissa;
    const steps = field ? 2 ** format.mantissa + rest : rest;
    return sign * steps * 2 ** (Math.max(field, 1) - biasOf(format) - format.mantissa);
  }

  // A number, a fraction, a power, or a sum of them: 0.1, 1/3, -2^-24, 1+2^-8, inf, nan. Else null.
  function parse(text) {
    const plain = text.trim().toLowerCase().replace(/\*\*/g, "^").replace(/\u2212/g, "-");
    if (/^[-+]?nan$/.test(plain)) return NaN;
    if (/^[-+]?inf(inity)?$/.test(plain)) return plain[0] === "-" ? -Infinity : Infinity;
    const number = "(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?";
    const term = `([-+]?)(${number})(?:([/^])([-+]?${number}))?`;
    if (!new RegExp(`^${term}(?:(?=[-+])${term})*$`).test(plain)) return null;
    let sum = -0;
    for (const [, sign, a, operator, b] of plain.matchAll(new RegExp(term, "g"))) {
      const size = operator === "/" ? a / b : operator === "^" ? (+a) ** b : +a;
      sum += sign === "-" ? -size : size;
    }
    return sum;
  }

  const show = (x) => (Object.is(x, -0) ? "-0" : String(x)).replace("Infinity", "inf");

  function verdict(format, x, stored) {
    if (stored === null) return "no code for NaN";
    if (Object.is(x, stored) || x === stored) return "exact";
    if (!Number.isFinite(stored)) return "overflow";
    if (stored === 0) return "becomes zero";
    if (!Number.isFinite(x)) return "held at its largest number";
    const relative = ((stored - x) / x) * (x < 0 ? -1 : 1);
    const error = `error ${(stored - x).toPrecision(2)} (${(100 * Math.abs(relative)).toPrecision(2)} %)`;
    return Math.abs(x) - Math.abs(stored) > stepAt(format, stored) ? `overflow, held at its largest number; ${error}` : error;
  }

  function mount(root) {
    root.dataset.ready = "yes";
    const input = root.querySelector("input"), said = root.querySelector(".said");
    const rows = FORMATS.map((format) => makeRow(root.querySelector(".rows"), format));

    function makeRow(parent, format) {
      const row = document.createElement("div");
      row.className = "row";
      row.innerHTML = '<div class="name"></div><div class="code" role="group"></div><div class="value"></div>';
      const [name, code, value] = row.children;
      name.textContent = format.name;
      code.setAttribute("aria-label", `${format.name}, bits; arrow keys move, space flips`);
      const buttons = [];
      for (const [part, count] of [["sign", 1], ["exponent", format.exponent], ["mantissa", format.mantissa]]) {
        const group = document.createElement("span");
        group.className = `part ${part}`;
        for (let i = 0; i < count; i++) {
          const button = document.createElement("button");
          button.type = "button";
          button.tabIndex = buttons.length ? -1 : 0;
          button.setAttribute("aria-label", `${part} bit ${i + 1} of ${count}`);
          buttons.push(button);
          group.append(button);
        }
        if (count) code.append(group);
      }
      const entry = { format, buttons, value, code: 0 };
      code.addEventListener("click", (event) => {
        const place = buttons.indexOf(event.target);
        if (place >= 0 && entry.code !== null) flip(entry, place);
      });
      code.addEventListener("keydown", (event) => {
        const here = buttons.indexOf(event.target), end = buttons.length - 1;
        const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: end }[event.key];
        if (to === undefined || to < 0 || to > end) return;
        event.preventDefault();
        buttons[here].tabIndex = -1;
        buttons[to].tabIndex = 0;
        buttons[to].focus();
      });
      parent.append(row);
      return entry;
    }

    function flip(entry, place) {
      const weight = 2 ** (entry.buttons.length - 1 - place);
      const on = Math.floor(entry.code / weight) % 2;
      const x = decode(entry.format, entry.code + (on ? -weight : weight));
      input.value = show(x);
      draw(x, `${entry.format.name}: this code is ${show(x)}`);
    }

    function draw(x, message) {
      said.textContent = message;
      for (const entry of rows) {
        const { format, buttons, value } = entry;
        entry.code = encode(format, x);
        const stored = entry.code === null ? null : decode(format, entry.code);
        buttons.forEach((button, i) => {
          const bit = entry.code === null ? "–" : Math.floor(entry.code / 2 ** (buttons.length - 1 - i)) % 2;
          button.textContent = bit;
          button.setAttribute("aria-pressed", bit === 1);
        });
        const strong = document.createElement("b");
        strong.textContent = stored === null ? "none" : show(stored);
        const finite = stored !== null && Number.isFinite(stored);
        const step = finite ? `; steps of ${show(+stepAt(format, stored).toPrecision(3))} here` : "";
        value.replaceChildren(strong, ` ${verdict(format, x, stored)}${step}`);
      }
    }

    function read() {
      const x = parse(input.value);
      if (x !== null) return draw(x, "");
      said.textContent = `“${input.value}” is not a number: allowed are 0.1, 1e-8, 1/3, 2^-24, 1+2^-8, inf, nan`;
    }

    for (const pick of PICKS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = pick;
      button.addEventListener("click", () => { input.value = pick; read(); });
      root.querySelector(".picks").append(button);
    }
    input.addEventListener("input", read);
    read();
  }

  window.memlabBits = { FORMATS, encode, decode, parse };
  document.querySelectorAll(".bit-explorer:not([data-ready])").forEach(mount);
})();
