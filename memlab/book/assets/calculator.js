  // The formula of memlab in a page. Functions bear the names of those of memlab/predict/formula.py,
  // memlab/predict/formula_ranks.py, memlab/card/step_time.py and memlab/card/op_cost.py, and do the same in the same order.
  //
  // known: their constants, the moments of traces, models and cards, as memlab/book/calculator.py gives them.
  function closedForm(known) {
    const { rules, reaches, phases } = known;
    const up = (bytes, unit) => Math.ceil(bytes / unit) * unit;
    const [FORWARD, BACKWARD, STEP] = ["forward", "backward", "optimizer step"].map((name) => phases.indexOf(name));

    // ------------------------------------------------------------ formula.py

    // The two halves of a recipe's trace; null where there are none.
    function read(recipe, card) {
      const { choices, ways } = known, number = (names, recipe) => names.reduce(
        (place, name) => place * choices[name].length + choices[name].indexOf(recipe[name]), 0);
      const { passes, updates } = known.structures[recipe.model.structure], precision = passPrecision(recipe);
      const place = choices.precision.includes(precision) ? number(ways.pass, { ...recipe, precision }) : NaN;
      return { pass: halfAt(passes[card.attention][2 * place + (recipe.accumulation > 1)] ?? null), update: halfAt(updates[number(ways.update, recipe)]) };
    }

    // A half as plain lists: [tensor, once, each] of each moment and of what is beside the other half's.
    function halfAt(place) {
      if (place === null) return null;
      const { tensors, beside, moments, work, parameters } = known.halves, counts = new Map();
      const added = (flat) => {  // a moment is kept as its difference from the one before
        for (const [tensor, once, each] of rowsOf(flat, 3)) {
          const [a, b] = counts.get(tensor) || [0, 0];
          counts.set(tensor, [a + once, b + each]);
        }
        return [...counts].map(([tensor, [once, each]]) => [tensor, once, each]);
      };
      return {
        tensors: tensors[place], beside: rowsOf(beside[place], 3), work: rowsOf(work[place], 5), parameters: parameters[place],
        moments: moments[place].map(([phase, ...flat]) => [phase, added(flat)]),
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
      checkRanks(recipe);
      if (longest && recipe.seq_len > longest) throw new Refusal(`seq_len is ${recipe.seq_len}: ${name} allows whole numbers from 1 to ${longest}`);
      requireNative(recipe.precision, card);
      checkDivided(recipe);
      checkHeads(recipe, card);
      if (window && recipe.seq_len >= window) throw new Refusal(
        `no trace is kept of ${name} with ${recipe.seq_len} tokens, only below its sliding window of ${window}: ask memlab simulate`);
      const { pass, update } = read(recipe, card);
      if (!pass || !update) throw new Refusal(`no trace is kept of ${said(recipe)} on ${card.name}: ask memlab simulate`);
      if (recipe.link) linkRate(card, recipe.link);
      return evaluate(recipe, pass, update, card);
    }

    const said = (recipe) => [recipe.model.name, ...known.ways.pass.map((name) => `${name} ${recipe[name]}`), `optimizer ${recipe.optimizer}`].join(", ");

    function requireNative(precision, card) {
      if (precision.includes("bf16") && !card.bf16) throw new Refusal(
        `precision is '${precision}': ${card.name} has no native bfloat16 and allows fp32, fp16, fp16-amp`);
    }

    function checkHeads({ attention, model }, card) {
      const size = model.dimensions.d;
      if (attention === "sdpa" && (size % 8 || size > card.longest_head)) throw new Refusal(
        `head size is ${size}: with sdpa on ${card.name} the formula allows multiples of 8 that take the kernels of smaller ones, simulate knows more`);
    }

    // The numbers that the terms stand for, by their places; 0 for what has no term.
    function valuesOf(sizes) {
      const { s } = sizes, found = new Map([[-1, 0]]), symbols = { ...sizes, "s+1": s + 1, "s-1": s - 1 };
      for (const unit of known.rounded) symbols[`s~${unit}`] = up(s, unit);
      return (term) => {
        if (!found.has(term)) {
          const [coefficient, powers] = known.terms[term];
          let product = 1;
          for (const [name, power] of Object.entries(powers)) for (let i = 0; i < power; i++) product *= symbols[name] || 0;
          found.set(term, coefficient * product);
        }
        return found.get(term);
      };
    }

    function evaluate(recipe, pass, update, card) {
      const { dimensions, layers } = recipe.model;
      const numbers = pass.parameters.map(([, once, each]) => once + layers * each);
      const trained = sum(pass.parameters.map(([, , , free], i) => free * numbers[i]));
      const value = valuesOf({
        ...dimensions, b: recipe.batch_size, s: recipe.seq_len, r: recipe.lora_rank, W: card.workspace, n: trained,
      });

      const tensors = [...pass.tensors, ...update.tensors], shift = pass.tensors.length;
      let sizes = tensors.map(([, term, item]) => up(value(term), item)), blocks = sizes.map(block);
      const count = (...lists) => {  // how many of each tensor, of lists of [tensor, once, each]
        const counts = new Array(tensors.length).fill(0);
        for (const [list, first] of lists) for (const [tensor, once, each] of list) counts[first + tensor] += once + layers * each;
        return counts;
      };
      const each = (...lists) => {  // how many more with each further layer
        const counts = new Array(tensors.length).fill(0);
        for (const [list, first] of lists) for (const [tensor, , each] of list) counts[first + tensor] += each;
        return counts;
      };
      const states = [update.beside, shift], left = [pass.beside, 0];
      const moments = [
        ...pass.moments.map(([phase, counts]) => ({ phase, counts: count(states, [counts, 0]) })),
        ...update.moments.map(([phase, counts]) => ({ phase, counts: count(states, left, [counts, shift]) })),
      ];
      let divided = null;
      if (recipe.ranks > 1) {
        const weights = pass.parameters.map(([term, , , free], i) => [round(value(term)), numbers[i], free]);
        divided = divide(recipe, {
          category: tensors.map(([category]) => known.categories[category]), moments, shift, layers, weights, sizes, passes: pass.moments.length,
          first: each(states, [pass.moments[0][1], 0]), last: each(states, left, [update.moments.at(-1)[1], shift]),
        });
        sizes = [...sizes, ...divided.sizes];
        blocks = sizes.map(block);
        moments.forEach((moment, i) => { moment.counts = [...divided.whole[i], ...divided.parts[i]]; });
      }
      const made = moments.map((_, i) => (divided ? divided.sums[i] + divided.gathered[i] : 0));
      moments.forEach((moment, i) => { moment.allocated = sum(moment.counts.map((n, t) => n * blocks[t])) + made[i]; });
      const worst = moments.reduce((a, b) => (b.allocated > a.allocated ? b : a)), peak = Math.trunc(worst.allocated) + rests(blocks, worst.counts);

      const breakdown = Object.fromEntries(known.categories.map((name) => [name, 0]));
      worst.counts.forEach((n, i) => { breakdown[known.categories[tensors[i % tensors.length][0]]] += round(n * sizes[i]); });
      if (divided) {
        breakdown.gradients += round(divided.sums[moments.indexOf(worst)]);
        breakdown.temporary += round(divided.gathered[moments.indexOf(worst)]);
      }
      breakdown.rounding = peak - sum(Object.values(breakdown));
      const weights = pass.parameters.map(([term], i) => round(value(term)) * numbers[i]);
      return {
        peak_allocated: peak,
        reserved_range: [peak, Math.max(peak, withoutReuse(blocks, moments) + Math.trunc(Math.max(...made)))],
        breakdown,
        peak_phase: phases[worst.phase],
        parameters: sum(weights),
        trainable_parameters: sum(weights.map((n, i) => n * pass.parameters[i][3])),
        step_time: card.bandwidth ? stepTime(withRanks(columns(pass, update, value, layers, recipe.accumulation), divided), card, divided && linkRate(card, recipe.link)) : null,
        samples: recipe.batch_size * recipe.accumulation,
      };
    }

    // The operators of a step, with numbers in place of terms.
    function columns(pass, update, value, layers, accumulation) {
      return [...pass.work, ...update.work].map(([operator, once, each, again, eachAgain]) => {
        const [dtype, flops, result, moved, lists, elements, phase, recomputed] = known.operators[operator];
        return {
          dtype, phase, recomputed,
          flops: value(flops),
          tiles: countTiles(result.map(value), dtype),
          nbytes: sum(moved.map(value)),
          kernels: countKernels(lists, value(elements)),
          times: once + layers * each + (accumulation - 1) * (again + layers * eachAgain),
        };
      });
    }

    // The operators of a rank: its part of the update, and a kernel for each copy and sending.
    function withRanks(work, divided) {
      if (!divided) return work;
      const shared = work.map((one) => (one.phase === STEP ? { ...one, nbytes: one.nbytes * divided.share, kernels: one.kernels * divided.share } : one));
      return [...shared, ...divided.traffic.map(([phase, sent, nbytes, times]) =>
        ({ dtype: "", phase, recomputed: 0, flops: 0, tiles: 0, nbytes, kernels: 1, times, sent }))];
    }

    // Bytes of the segments if every size of block had its own, and one more of the largest that come and go.
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

    // Bytes that are left of segments which several blocks share, and stay with the last of them; the largest come first.
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

    // ------------------------------------------------------------ splitting.py, and what recipe.py says of ranks

    const fully = ({ ranks, sharding }) => ranks > 1 && known.fully_sharded.includes(sharding);
    const passPrecision = (recipe) => (fully(recipe) ? known.computed_in[recipe.precision] : recipe.precision);

    function checkRanks(recipe) {
      if (fully(recipe) && !known.sharded_optimizers.includes(recipe.optimizer)) throw new Refusal(
        `optimizer is '${recipe.optimizer}' and sharding is '${recipe.sharding}': it takes no parts of weights, allowed are ${
          known.sharded_optimizers.join(", ")}, or sharding ddp or zero1`);
    }

    function checkDivided(recipe) {
      if (!fully(recipe)) return;
      const { base } = known.trained[recipe.trained].changes;
      if (base) throw new Refusal(`base is '${base}' and sharding is '${recipe.sharding}': the formula allows none, simulate knows more`);
      if (known.structures[recipe.model.structure].two_stacks) throw new Refusal(
        `sharding is '${recipe.sharding}': the formula allows ddp and zero1 for two stacks of layers, simulate knows more`);
    }

    function divide(recipe, table) {
      return fully(recipe) ? dividedFully(recipe, table) : copied(recipe, table);
    }

    // Under DistributedDataParallel, whose buckets hold a copy of every gradient all the time.
    function copied(recipe, { category, moments, shift, weights, sizes }) {
      const trained = weights.filter(([, , free]) => free), others = 1 - 1 / recipe.ranks;
      const bucketed = sum(moments.at(-1).counts.map((n, t) => (category[t] === "gradients" ? n * sizes[t] : 0)));
      const all = sum(trained.map(([elements, number]) => elements * number));
      const each = trained.map(([elements, number]) => [elements * bucketed / all, number]);
      const traffic = each.map(([size, number]) => [BACKWARD, others * size, 2 * size, 2 * number]);
      let share = 1;
      if (recipe.sharding === "zero1") {
        share = firstShare(trained, recipe.ranks);
        traffic.push(...each.map(([size, number]) => [STEP, size, 0, number]));
      }
      const part = category.map((name, t) => name === "optimizer_states" || (t >= shift && name === "temporary"));
      return {
        whole: moments.map(({ counts }) => counts.map((n, t) => (part[t] ? 0 : n))),
        parts: moments.map(({ counts }) => counts.map((n, t) => (part[t] ? n : 0))),
        sizes: sizes.map((size) => size * share), sums: moments.map(() => bucketed), gathered: moments.map(() => 0), share, traffic,
      };
    }

    // Under fully_shard, of each layer by itself and of what stands around the layers together.
    function dividedFully(recipe, { category, moments, shift, layers, weights, sizes, passes, first, last }) {
      const is = (name) => category.map((one) => one === name), bytes = { fp32: 4, fp16: 2, bf16: 2 };
      const weight = is("parameters"), gradient = is("gradients"), temporary = is("temporary"), states = is("optimizer_states");
      const stored = (bytes[recipe.precision] || 4) / bytes[known.computed_in[recipe.precision]];
      const blocks = sizes.map(block), over = (which, counts, each) => sum(counts.map((n, t) => (which[t] ? n * each[t] : 0)));
      const layer = over(weight, first, blocks), around = over(weight, moments[0].counts, blocks) - layers * layer;
      const ofLayer = last.map((n, t) => (gradient[t] ? n : 0)), ofLayers = ofLayer.flatMap((n, t) => (n ? [t] : []));
      const large = sizes.map((size, t) => temporary[t] && size >= recipe.batch_size * recipe.seq_len * recipe.model.dimensions.V);
      const found = { whole: [], parts: [], sums: [], gathered: [] };
      moments.forEach(({ phase, counts }, i) => {
        const update = i >= passes;
        let sums = 0, behind = 0;
        if (recipe.accumulation > 1) {
          if (!update) sums = sum(counts.map((n, t) => (gradient[t] ? n * (block(sizes[t] * stored) - blocks[t]) : 0)));
        } else {
          const done = ofLayers.every((t) => counts[t] >= layers * ofLayer[t]);
          const begun = Math.max(0, ...ofLayers.map((t) => Math.ceil(counts[t] / ofLayer[t])));
          behind = update ? 0 : done ? layers : Math.max(0, begun - 1);
          if (behind > 0) sums = sum(ofLayer.map((n, t) => n * sizes[t])) * stored;
        }
        const parts = counts.map((n, t) => (weight[t] || states[t] || (t >= shift && temporary[t]) || (update && gradient[t]) ? n :
          update ? 0 : Math.min(n, behind * ofLayer[t]) * (ofLayer[t] > 0)));
        const atHead = counts.some((n, t) => large[t] && n > 0), backward = phase === BACKWARD || behind > 0;
        const here = recipe.sharding === "zero2" ? layers - behind + !backward : atHead ? 1 : backward ? Math.min(2, layers - behind) : 3;
        found.parts.push(parts);
        found.whole.push(counts.map((n, t) => n - parts[t]));
        found.sums.push(sums);
        found.gathered.push(update ? 0 : around + layer * here);
      });
      const others = 1 - 1 / recipe.ranks, groups = layers + 1, times = recipe.accumulation * groups;
      const model = over(weight, moments[0].counts, sizes) / groups, summed = over(gradient, moments.at(-1).counts, sizes) * stored / groups;
      const traffic = [[FORWARD, others * model, 2 * model, times]];
      if (recipe.sharding === "zero3") traffic.push([BACKWARD, others * model, 2 * model, times]);
      traffic.push([BACKWARD, others * summed, 2 * summed, groups]);
      const ratio = (t) => (t < shift && (weight[t] || gradient[t]) ? stored : 1) / recipe.ranks;
      return { ...found, sizes: sizes.map((size, t) => size * ratio(t)), share: 1 / recipe.ranks, traffic };
    }

    // The share of the weights whose states the first rank keeps: each goes, the largest first, to the rank that has least.
    function firstShare(trained, ranks) {
      const held = new Array(ranks).fill(0), weights = trained.flatMap(([elements, number]) => new Array(number).fill(elements));
      for (const one of weights.sort((a, b) => b - a)) held[held.indexOf(Math.min(...held))] += one;
      return held[0] / sum(weights);
    }

    // ------------------------------------------------------------ links.py

    function linkRate(card, link) {
      const named = link || ("nvlink" in card.links ? "nvlink" : "pcie");
      if (!(named in card.links)) throw new Refusal(`link is '${named}': allowed are for ${card.name} ${Object.keys(card.links).join(", ")}`);
      return card.links[named];
    }

    // ------------------------------------------------------------ work.py

    function countTiles([matrices, rows, columns] = [0, 0, 0], dtype) {
      const [high, wide] = known.tiles[dtype] || known.tiles[""];
      return matrices * Math.ceil(rows / high) * Math.ceil(columns / wide);
    }

    function countKernels(lists, elements) {
      const tensors = known.tensors_of_launch[Math.min(lists, known.tensors_of_launch.length - 1)];
      return Math.max(1 / tensors, Math.ceil(elements / rules.ELEMENTS_OF_BLOCK) / rules.BLOCKS_OF_LAUNCH);
    }

    // ------------------------------------------------------------ step_time.py

    function stepTime(work, card, over) {
      const [low, parts, high] = ["best", "expected", "worst"].map((name) => secondsOf(work, card, reaches[name], over));
      return {
        sent: round(sum(work.map((one) => (one.sent || 0) * one.times))), low: sum(Object.values(low)), expected: sum(Object.values(parts)), high: sum(Object.values(high)), parts };
    }

    function secondsOf(work, card, reach, over) {
      const parts = Object.fromEntries(known.parts.map((name) => [name, 0]));
      const [onHost, onCard, sending] = [0, 0, 0].map(() => phases.map(() => 0));
      for (const one of work) {
        const byFlops = one.flops / (one.dtype ? rate(one.dtype, card) * reached(one.dtype, reach) * busy(one.tiles, card.processors) : 1);
        const byBytes = one.nbytes / (card.bandwidth * reach.bandwidth);
        const longest = Math.max(byFlops, byBytes, one.kernels * reach.kernel) * one.times;
        const part = one.phase === STEP ? "optimizer" : one.recomputed ? "recomputation" : byFlops > byBytes ? "matrix products" : "memory traffic";
        parts[part] += longest;
        onHost[one.phase] += one.kernels * one.times * reach.operator;
        onCard[one.phase] += longest;
        if (one.sent) sending[one.phase] += one.sent * one.times / (over * reach.bandwidth);
      }
      parts["waiting for launches"] = sum(onHost.map((seconds, i) => Math.max(0, seconds - onCard[i])));
      parts.communication = sum(sending.map((seconds, i) =>
        seconds - (i === STEP ? 0 : reach.hidden * Math.min(seconds, Math.max(onHost[i], onCard[i])))));
      return parts;
    }

    const rate = (dtype, card) => card.rates[dtype] || (dtype === "tf32" && card.rates.float32) || refuseRate(dtype, card);
    function refuseRate(dtype, card) {
      throw new Refusal(`${card.name} has no rate for ${dtype}: it has those of ${Object.keys(card.rates).join(", ")}`);
    }
    const reached = (dtype, reach) => (["float32", "float64"].includes(dtype) ? reach.products : reach.tensor_products);
    const busy = (tiles, processors) => (tiles > 0 ? tiles / Math.max(Math.ceil(tiles / processors) * processors, 1) : 1);

    // ------------------------------------------------------------ planning.py

    // The answer of `fits`, for the least and for the most that the allocator may reserve.
    function judge(found, card) {
      const [least, most] = found.reserved_range.map((bytes) => bytes + card.context), allowed = room(card, rules);
      const verdict = most <= allowed ? "fits" : least > allowed ? "does not fit" : "may fit";
      return { verdict, least, most, allowed };
    }

    // ------------------------------------------------------------ models.py and the reading of a config.json

    // The model of the values of a config.json: its structure, dimensions and layers.
    function modelOf(values, name) {
      const { type, held, get, dimensions, layers, longest, window } = readConfig(values, known);
      if ((get("num_decoder_layers") || layers) !== layers) throw new Refusal(
        `${type} with ${layers} layers: the formula allows as many in a decoder as in the encoder`);
      const structure = known.structures.findIndex((one) => one.model_type === type && !unlike(one, held, get));
      if (structure < 0) throw new Refusal(`no trace is kept of this ${type}: ${
        known.structures.filter((one) => one.model_type === type).map((one) => unlike(one, held, get)).join("; or ")}`);
      return { name: name || type, structure, dimensions, layers, longest, window };
    }

    // In what a config differs from a structure, apart from its sizes; empty where it does not.
    function unlike({ settings, sizes, grouped }, held, get) {
      const heads = get("num_attention_heads"), groups = get("num_key_value_heads") || heads;
      if (groups < heads !== grouped) return grouped ? "known are fewer key-value heads than heads" : "known are as many key-value heads as heads";
      for (const [name, wanted] of Object.entries(settings))
        if (setting(name, held[name]) !== wanted) return `${name} is ${JSON.stringify(held[name])}, known is ${JSON.stringify(wanted)}`;
      for (const name of known.optional_sizes) {
        const usual = known.head_sizes.includes(name) && held[name] * heads === get("hidden_size");
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
        const kind = value.rope_type || value.type || "default";
        return known.same_rope.includes(kind) ? "default" : kind;
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
