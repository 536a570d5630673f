  // What the calculators share: refusals, whole numbers, cards by their GiB, and a config.json.

  // What a panel says in place of an answer.
  class Refusal extends Error {}

  const PASTED = "a pasted config.json", BY_SIZE = "another, by its GiB";

  function wholeFrom(least, name, text) {
    if (!/^\d+$/.test(text) || Number(text) < least) throw new Refusal(`${name} is ${text || "empty"}: allowed are whole numbers from ${least}`);
    return Number(text);
  }

  // The card that is chosen; the last of `cards` lends its rules to a number of GiB.
  function cardOf({ gpu, gib }, cards) {
    if (gpu !== BY_SIZE) return cards.find((card) => card.name === gpu);
    if (!(Number(gib) > 0)) throw new Refusal(`gpu is ${gib || "empty"} GiB: allowed are numbers above 0`);
    return { ...cards.at(-1), name: `a card of ${gib} GiB`, total: Math.floor(gib * 2 ** 30) };
  }

  // As a command line takes it.
  const cardOption = ({ gpu, gib }) => (gpu === BY_SIZE ? Math.floor(gib * 2 ** 30) : gpu);

  // What memlab/predict/fit.py leaves of a card.
  const room = (card, { MARGIN, CONTEXT_MARGIN }) => Math.ceil((card.total - CONTEXT_MARGIN * (card.context > 0)) / (1 + MARGIN));

  // The nearest whole number, of two the even one, as Python and numpy round.
  function round(x) {
    const low = Math.floor(x), rest = x - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  }

  function pasted(text) {
    if (!text.trim()) throw new Refusal("Paste the config.json of a model, as it stands in its folder or on its hub page.");
    try { return JSON.parse(text); } catch { throw new Refusal("config.json: this is not a readable JSON file"); }
  }

  // The values of a config.json, with what its class has where they say nothing. Of one that nests several models, those of
  // the text; `beside` names the others.
  //
  // families: model_type -> other names and defaults of the class; widths: names of a feed-forward width.
  function readConfig(given, { families, widths }) {
    const values = given?.text_config || given, nested = Object.keys(given || {}).filter((name) => /_config$/.test(name) && given[name]?.model_type);
    const beside = values === given ? [] : nested.filter((name) => name !== "text_config").map((name) => name.replace("_config", ""));
    const type = values?.model_type, family = families[type];
    if (!family) throw new Refusal(`model_type is ${JSON.stringify(type)}: known are ${Object.keys(families).join(", ")}`);
    const own = (name) => family.aliases[name] || name, held = { ...family.defaults };
    for (const [name, value] of Object.entries(values)) held[own(name)] = value;
    held.rope_parameters = values.rope_parameters || values.rope_scaling || family.defaults.rope_parameters;
    if (held.use_sliding_window === false) held.sliding_window = null;
    const get = (name) => held[own(name)] ?? null;

    const heads = get("num_attention_heads"), groups = get("num_key_value_heads") || heads, layers = get("num_hidden_layers");
    const size = get("head_dim") || get("d_kv"), width = widths.find((name) => get(name));
    const dimensions = {
      V: get("vocab_size"), g: groups, m: Math.floor(heads / groups), h: get("hidden_size"), d: size || Math.floor(get("hidden_size") / heads),
      ...(width && { f: get(width) }), ...(get("max_position_embeddings") && { P: get("max_position_embeddings") }),
    };
    const names = { V: "vocab_size", g: "num_key_value_heads", h: "hidden_size", d: "head_dim", f: width, P: "max_position_embeddings" };
    for (const [what, number] of Object.entries({ ...dimensions, num_hidden_layers: layers }))
      if (!(Number.isInteger(number) && number >= 1)) throw new Refusal(`${names[what] || what} is ${number}: allowed are whole numbers from 1`);
    if (!size && dimensions.h % heads) throw new Refusal(`num_attention_heads is ${heads}: allowed are divisors of hidden_size, ${dimensions.h}`);
    if (heads % groups) throw new Refusal(`num_key_value_heads is ${groups}: allowed are divisors of num_attention_heads, ${heads}`);
    return { type, held, get, dimensions, layers, longest: maxLength(type, held, get), window: get("sliding_window"), beside };
  }

  // The longest sequence, null where positions are only relative; as memlab/models.py has it.
  function maxLength(type, held, get) {
    if (held.position_biased_input === false) return null;
    const longest = get("max_position_embeddings"), rope = held.rope_parameters || {}, kind = rope.rope_type || rope.type;
    if (!longest) return null;
    if (["linear", "dynamic"].includes(kind)) return round(longest * rope.factor);
    if (kind === "yarn") return Math.max(longest, round((rope.original_max_position_embeddings || longest) * rope.factor));
    return type === "roberta" ? longest - (held.pad_token_id + 1) : longest;
  }

