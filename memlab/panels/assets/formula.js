  // The memory and the time of a training step by arithmetic alone: a kept trace without its replay. Every tensor has a size
  // like 4 * b * s * f bytes, and at each moment at which a peak can be (memlab/panels/moments.py) there are so many of each
  // kind. Tensors are exact, each in the block that the allocator would give it in a fresh segment; the order of events is not
  // known, so what is reserved is a range, whose upper end is usual and no bound. Seconds are those of memlab/card/step_time.py
  // and memlab/trace/work.py, by functions of the same names. tests/panels/test_calculator.py compares all with simulations.
  //
  // known: their constants, the moments of traces, models and cards, as memlab/panels/calculator.py gives them.
  function formulaOf(known) {
    const { rules, reaches, phases } = known;
    const up = (bytes, unit) => Math.ceil(bytes / unit) * unit;
    const [FORWARD, BACKWARD, STEP] = ["forward", "backward", "optimizer step"].map((name) => phases.indexOf(name));

    // ------------------------------------------------------------ the sums

    // The two halves of a recipe's trace; null where there are none.
    function read(recipe, card) {
      const { choices, ways } = known, { passes, updates } = known.structures[recipe.model.structure];
      const number = (names) => names.reduce((place, name) => place * choices[name].length + choices[name].indexOf(recipe[name]), 0);
      return { pass: halfAt(passes[card.attention][2 * number(ways.pass) + (recipe.accumulation > 1)]), update: halfAt(updates[number(ways.update)]) };
    }

    // A half as plain lists: [tensor, once, each] of each moment and of what is beside the other half's.
    function halfAt(place) {
      if (place === null) return null;
      const halves = Object.entries(known.halves).map(([name, { rows, of }]) => [name, rows[of[place]]]);
      const { layers, tensors, beside, moments, work, parameters } = Object.fromEntries(halves), counts = new Map();
      const added = (flat) => {  // a moment is kept as its difference from the one before
        for (const [tensor, once, each] of rowsOf(flat, 3)) {
          const [a, b] = counts.get(tensor) || [0, 0];
          counts.set(tensor, [a + once, b + each]);
        }
        return [...counts].map(([tensor, [once, each]]) => [tensor, once, each]);
      };
      return {
        layers, tensors, parameters, beside: rowsOf(beside, 3), work: rowsOf(work, 5),
        moments: moments.map(([phase, ...flat]) => [phase, added(flat)]),
      };
    }

    // Rows of a list in which each begins with the distance from the one before.
    function rowsOf(flat, width) {
      const rows = [];
      for (let i = 0, place = 0; i < flat.length; i += width) rows.push([place += flat[i], ...flat.slice(i + 1, i + width)]);
      return rows;
    }

    function formula(recipe, card) {
      const { longest, window, name } = recipe.model;
      checkBase(recipe);
      if (longest && recipe.seq_len > longest) throw new Refusal(`seq_len is ${recipe.seq_len}: ${name} allows whole numbers from 1 to ${longest}`);
      requireNative(recipe.precision, card);
      checkHeads(recipe, card);
      if (window && recipe.seq_len >= window) throw new Refusal(
        `no trace is kept of ${name} with ${recipe.seq_len} tokens, only below its sliding window of ${window}: ask memlab simulate`);
      const { pass, update } = read(recipe, card);
      const patterns = [pass, update].map((half) => (half ? patternsOf(half.layers, recipe.model.layers) : 0));
      if (!patterns[0] || patterns[0] !== patterns[1]) throw new Refusal(`no trace is kept of ${said(recipe)} on ${card.name}: ask memlab simulate`);
      return evaluate(recipe, pass, update, patterns[0], card);
    }

    // Patterns of a model with so many layers, 0 where it does not come out even.
    function patternsOf([before, period, after], layers) {
      const patterns = (layers - before - after) / period;
      return Number.isInteger(patterns) && patterns > 0 ? patterns : 0;
    }

    const said = (recipe) => [recipe.model.name, ...known.ways.pass.map((name) => `${name} ${recipe[name]}`), `optimizer ${recipe.optimizer}`].join(", ");

    function requireNative(precision, card) {
      if (precision.includes("bf16") && !card.bf16) throw new Refusal(
        `precision is '${precision}': ${card.name} has no native bfloat16 and allows fp32, fp16, fp16-amp`);
    }

    function checkBase({ trained, precision }) {
      const { base } = known.trained[trained].changes;
      if (base === "half" && !known.autocast.includes(precision)) throw new Refusal(
        `base is 'half' and precision is '${precision}': without autocast the base has the format of precision, allowed are ${known.autocast.join(", ")}`);
    }

    function checkHeads({ attention, model }, card) {
      const size = model.dimensions.d;
      const usual = size % 8 === 0 && card.heads.some(([least, most]) => least <= size && size <= most);
      if (attention === "sdpa" && !usual) throw new Refusal(
        `head size is ${size}: with sdpa on ${card.name} the formula allows multiples of 8 that take the kernels of smaller ones, simulate covers more`);
    }

    // The numbers that the terms stand for, by their places; 0 for what has no term.
    function valuesOf(sizes) {
      const { s } = sizes, found = new Map([[-1, 0]]), symbols = { ...sizes, "s+1": s + 1, "s-1": s - 1 };
      for (const unit of known.rounded) symbols[`s~${unit}`] = up(s, unit);
      return function valueOf(term) {
        if (!found.has(term)) {
          const [constant, powers, matrix] = known.terms[term];
          let product = matrix ? bufferOf(...matrix.map((one) => round(valueOf(one))), sizes.T) : 1;
          for (const [name, power] of Object.entries(powers)) for (let i = 0; i < power; i++) product *= symbols[name] || 0;
          found.set(term, constant * product);
        }
        return found.get(term);
      };
    }

    function evaluate(recipe, pass, update, patterns, card) {
      const { dimensions } = recipe.model;
      const numbers = pass.parameters.map(([, once, each]) => once + patterns * each);
      const trained = sum(pass.parameters.map(([, , , free], i) => free * numbers[i]));
      const value = valuesOf({
        ...dimensions, b: recipe.batch_size, s: recipe.seq_len, r: recipe.lora_rank, W: card.workspace, T: card.threads, n: trained,
      });

      const tensors = [...pass.tensors, ...update.tensors], shift = pass.tensors.length;
      const sizes = tensors.map(([, term, item]) => up(value(term), item)), blocks = sizes.map(block);
      const count = (...lists) => {  // how many of each tensor, of lists of [tensor, once, each]
        const counts = new Array(tensors.length).fill(0);
        for (const [list, first] of lists) for (const [tensor, once, each] of list) counts[first + tensor] += once + patterns * each;
        return counts;
      };
      const states = [update.beside, shift], left = [pass.beside, 0];
      const moments = [
        ...pass.moments.map(([phase, counts]) => ({ phase, counts: count(states, [counts, 0]) })),
        ...update.moments.map(([phase, counts]) => ({ phase, counts: count(states, left, [counts, shift]) })),
      ];
      for (const moment of moments) moment.allocated = sum(moment.counts.map((n, t) => n * blocks[t]));
      const worst = moments.reduce((a, b) => (b.allocated > a.allocated ? b : a)), peak = worst.allocated + rests(blocks, worst.counts);

      const breakdown = Object.fromEntries(known.categories.map((name) => [name, 0]));
      worst.counts.forEach((n, i) => { breakdown[known.categories[tensors[i][0]]] += round(n * sizes[i]); });
      breakdown.rounding = peak - sum(Object.values(breakdown));
      const weights = pass.parameters.map(([term], i) => round(value(term)) * numbers[i]);
      return {
        peak_allocated: peak,
        reserved_range: [peak, Math.max(peak, withoutReuse(blocks, moments))],
        breakdown,
        peak_phase: phases[worst.phase],
        parameters: sum(weights),
        trainable_parameters: sum(weights.map((n, i) => n * pass.parameters[i][3])),
        step_time: card.traffic ? stepTime(columns(pass, update, value, patterns, recipe.accumulation), card) : null,
        samples: recipe.batch_size * recipe.accumulation,
      };
    }

    // The operators of a step, with numbers in place of terms.
    function columns(pass, update, value, patterns, accumulation) {
      return [...pass.work, ...update.work].map(([operator, once, each, again, eachAgain]) => {
        const [dtype, flops, result, moved, lists, elements, phase, recomputed] = known.operators[operator];
        return {
          dtype, phase, recomputed,
          flops: value(flops),
          tiles: countTiles(result.map(value), dtype),
          nbytes: sum(moved.map(value)),
          kernels: countKernels(lists, value(elements)), coded: lists ? 0 : value(elements),
          times: once + patterns * each + (accumulation - 1) * (again + patterns * eachAgain),
        };
      });
    }

    // Bytes of the segments if every size of block had its own: the most of each, summed up. And one more of the largest that
    // come and go: a smaller tensor splits the free block of one, and the next finds it too small.
    function withoutReuse(blocks, moments) {
      const pools = { small: 0, medium: 0, large: 0 };
      let split = 0;
      for (const bytes of new Set(blocks)) {
        const same = blocks.flatMap((other, i) => (other === bytes ? [i] : []));
        const there = moments.map(({ counts }) => sum(same.map((i) => counts[i]))), held = Math.max(...there);
        const pool = bytes <= rules.SMALL_REQUEST ? "small" : bytes >= rules.MEDIUM_REQUEST ? "large" : "medium";
        pools[pool] += held * (pool === "large" ? up(bytes, rules.LARGE_ROUND) : bytes);
        if (pool === "large" && Math.min(...there) < held) split = Math.max(split, up(bytes, rules.LARGE_ROUND));
      }
      return split + up(pools.small, rules.SMALL_SEGMENT) + up(pools.medium, rules.MEDIUM_SEGMENT) + up(pools.large, rules.LARGE_ROUND);
    }

    // Bytes that are left of segments which several blocks share, and stay with the last of them: the allocator does not split
    // off a rest of up to 1 MiB. Of weights of 1.125 MiB 17 fill a segment of 20 MiB but for 0.875. The largest come first.
    function rests(blocks, counts) {
      const numbers = new Map();
      blocks.forEach((bytes, i) => { numbers.set(bytes, (numbers.get(bytes) || 0) + counts[i]); });
      let found = 0, left = [...numbers].map(([bytes, n]) => [bytes, Math.trunc(n)])
        .filter(([bytes, n]) => n && bytes > rules.SMALL_REQUEST && bytes < rules.MEDIUM_REQUEST).sort(([a], [b]) => b - a);
      while (left.length) {
        let rest = rules.MEDIUM_SEGMENT;
        const taken = left.map(([bytes, n]) => { const fitting = Math.min(n, Math.floor(rest / bytes)); rest -= fitting * bytes; return fitting; });
        const segments = Math.min(...left.flatMap(([, n], i) => (taken[i] ? [Math.floor(n / taken[i])] : [])));
        if (rest <= rules.SMALL_REQUEST) found += segments * rest;
        left = left.map(([bytes, n], i) => [bytes, n - segments * taken[i]]).filter(([, n]) => n);
      }
      return found;
    }

    // The allocator's block for a tensor; in a segment of its own, a rest up to 1 MiB included.
    function block(size) {
      const bytes = up(Math.ceil(size), rules.MIN_BLOCK), segment = up(bytes, rules.LARGE_ROUND);
      return bytes >= rules.MEDIUM_REQUEST && segment - bytes <= rules.SMALL_REQUEST ? segment : bytes;
    }

    // Bytes of the buffer of a sum along the rows of a matrix: memlab/trace/reductions.py.
    function bufferOf(rows, columns, threads) {
      const { THREADS, WARP, LEAST, MOST, ACCUMULATED } = rules;
      const atOnce = [4, 2, 1].find((n) => columns % n === 0), most = THREADS / atOnce;
      const [wide, high] = [columns / atOnce, rows].map((n) => Math.min(2 ** Math.floor(Math.log2(n)), most));
      const height = Math.min(high, most / Math.min(wide, WARP)), width = Math.min(wide, most / height);
      const values = Math.ceil(rows / height), grid = Math.ceil(columns / atOnce / width);
      const wanted = Math.floor(threads / (width * height));
      if (rows < Math.min(height * LEAST, MOST) || values < MOST || grid > wanted) return 0;
      const blocks = Math.max(Math.min(Math.ceil(wanted / grid), Math.ceil(values / LEAST)), Math.ceil(values / MOST));
      return blocks > 1 ? ACCUMULATED * columns * blocks * width * atOnce : 0;
    }

    // ------------------------------------------------------------ work.py

    function countTiles([matrices, rows, columns] = [0, 0, 0], dtype) {
      const [high, wide] = known.tiles[dtype] || known.tiles[""];
      return matrices * Math.ceil(rows / high) * Math.ceil(columns / wide);
    }

    function countKernels(lists, elements) {
      if (!lists) return 1;
      const tensors = known.tensors_of_launch[Math.min(lists, known.tensors_of_launch.length - 1)];
      return Math.max(1 / tensors, Math.ceil(elements / rules.ELEMENTS_OF_BLOCK) / rules.BLOCKS_OF_LAUNCH);
    }

    // ------------------------------------------------------------ step_time.py

    function stepTime(work, card) {
      const [high, parts, low] = ["worst", "expected", "best"].map((name, i) => secondsOf(work, card, reaches[name], i));
      return { low: sum(Object.values(low)), expected: sum(Object.values(parts)), high: sum(Object.values(high)), parts };
    }

    // which: the place of what products reach of the least, the expected and the most.
    function secondsOf(work, card, reach, which) {
      const parts = Object.fromEntries(known.parts.map((name) => [name, 0]));
      const [onHost, onCard] = [0, 0].map(() => phases.map(() => 0));
      const attention = card.hopper ? reach.on_hopper : reach.attention;
      for (const one of work) {
        const share = (one.tiles > 0 ? reach.products : attention) * busy(one.tiles, card.processors);
        const byFlops = one.dtype ? one.flops / (reached(one.dtype, card)[which] * share) : 0;
        const near = one.nbytes <= card.cache / 2 ? reach.cache : 1;
        const byBytes = one.nbytes / (card.traffic * reach.memory * near);
        const byClocks = one.coded * reach.coded / (card.processors * card.clock);
        const longest = Math.max(byFlops, byBytes, byClocks, one.kernels * reach.kernel) * one.times;
        const part = one.phase === STEP ? "optimizer" : one.recomputed ? "recomputation" : byFlops > byBytes ? "matrix products" : "memory traffic";
        parts[part] += longest;
        const called = one.recomputed || one.phase === FORWARD ? reach.forward : one.phase === BACKWARD ? reach.backward : reach.update;
        onHost[one.phase] += one.kernels * one.times * called * (one.coded ? rules.CALLS_OF_CODED : 1);
        onCard[one.phase] += longest;
      }
      parts["waiting for launches"] = sum(onHost.map((seconds, i) => Math.max(0, seconds - onCard[i])));
      return parts;
    }

    function reached(dtype, card) {
      if (card.reached[dtype]) return card.reached[dtype];
      throw new Refusal(`${card.name} has no rate for ${dtype}: it has rates for ${card.rates.join(", ")}`);
    }
    const busy = (tiles, processors) => (tiles > 0 ? tiles / Math.max(Math.ceil(tiles / processors) * processors, 1) : 1);

    // ------------------------------------------------------------ does it fit

    // The answer of `fits`, for the least and for the most that the allocator may reserve.
    function judge(found, card) {
      const [least, most] = found.reserved_range.map((bytes) => bytes + card.context), allowed = room(card, rules);
      const verdict = most <= allowed ? "fits" : least > allowed ? "does not fit" : "may fit";
      return { verdict, least, most, allowed };
    }

    // ------------------------------------------------------------ models.py and the reading of a config.json

    // The model of the values of a config.json: its structure, dimensions and layers.
    function modelOf(values) {
      const { type, held, get, dimensions, layers, longest, window, beside } = readConfig(values, known);
      if ((get("num_decoder_layers") || layers) !== layers) throw new Refusal(
        `${type} with ${layers} layers: the formula allows as many in a decoder as in the encoder`);
      const structure = known.structures.findIndex((one) => one.model_type === type && !unlike(one, held, get));
      if (structure < 0) throw new Refusal(`no trace is kept of this ${type}: ${
        known.structures.filter((one) => one.model_type === type).map((one) => unlike(one, held, get)).join("; or ")}`);
      return { name: type, structure, dimensions, layers, longest, window, beside };
    }

    // In what a config differs from a structure, apart from its sizes; empty where it does not.
    function unlike({ settings, sizes, heads_of_a_key: usual }, held, get) {
      const shared = get("num_attention_heads") / (get("num_key_value_heads") || get("num_attention_heads"));
      if (usual ? shared !== usual : shared === 1) return `heads for each key-value head are ${shared}, known are ${usual || "several"}`;
      for (const [name, wanted] of Object.entries(settings)) {
        const own = setting(name, held[name]);
        if (Array.isArray(wanted) && (own ?? null) === null) {  // its class makes it, for so many layers
          const layers = get("num_hidden_layers");
          if (wanted.length !== layers) return `it has ${layers} layers, known are ${wanted.length}`;
          continue;
        }
        if (JSON.stringify(own) !== JSON.stringify(wanted)) return `${name} is ${JSON.stringify(own)}, known is ${JSON.stringify(wanted)}`;
      }
      for (const name of known.optional_sizes) {
        const usual = known.head_sizes.includes(name) && held[name] * get("num_attention_heads") === get("hidden_size");
        if (!sizes.includes(name) && held[name] && !usual) return `${name} is ${held[name]}, known is none`;
        if (sizes.includes(name) && !held[name] && !known.head_sizes.includes(name)) return `${name} is none, known is a number`;
      }
      return "";
    }

    // A setting as `_structure` keeps it.
    function setting(name, value) {
      if (Array.isArray(value) && new Set(value).size === 1) return setting(name, value[0]);
      if (typeof value === "number" && name.includes("drop")) return value > 0;
      if (value && typeof value === "object") {
        const kind = value.rope_type || value.type || "default", share = value.partial_rotary_factor || 1;
        const same = known.same_rope.includes(kind) ? "default" : kind;
        return share === 1 ? same : `${same}, of ${share} of a head`;
      }
      return value;
    }

    return { formula, judge, modelOf };
  }

  // JSON that was packed by gzip and base64; the browser's own unpacking asks nobody.
  async function unpack(packed) {
    if (typeof DecompressionStream === "undefined") throw new Refusal(
      "this browser cannot unpack the calculator's tables: it works in browsers from 2023 on");
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  }
