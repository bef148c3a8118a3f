// Reading a recorded trace (Chrome's trace event format): which operators took the time, and what
// called what. Pure: no page, no requests.

/** `{operators, tree, total, thread}` of the busiest thread; null: there are no calls in it. Times in µs. */
export function readTrace(trace) {
  const events = (Array.isArray(trace) ? trace : (trace.traceEvents ?? [])).filter(
    (one) => one.ph === "X" && one.dur > 0 && Number.isFinite(one.ts) && one.cat !== "Trace",
  );
  if (!events.length) return null;
  const threads = new Map();
  for (const one of events) {
    const name = `${one.pid} ${one.tid}`;
    if (!threads.has(name)) threads.set(name, []);
    threads.get(name).push(one);
  }
  const [thread, calls] = [...threads].reduce((a, b) => (b[1].length > a[1].length ? b : a));
  const root = { name: "all", total: 0, own: 0, count: 1, children: new Map() };
  const operators = new Map();
  nest(calls, root, operators);
  const sorted = [...operators.values()].sort((a, b) => b.own - a.own);
  return { operators: sorted, tree: root, total: root.total, thread, threads: threads.size };
}

function nest(calls, root, operators) {
  calls.sort((a, b) => a.ts - b.ts || b.dur - a.dur);
  const stack = [{ node: root, end: Infinity }];
  for (const { name, cat, ts, dur } of calls) {
    while (stack.at(-1).end <= ts) stack.pop();
    const parent = stack.at(-1).node;
    // Steps are numbered, and one is as good as another.
    const text = cat === "user_annotation" ? String(name).replace(/[ _#]\d+$/, "") : String(name);
    let node = parent.children.get(text);
    if (!node) {
      node = { name: text, total: 0, own: 0, count: 0, children: new Map() };
      parent.children.set(text, node);
    }
    node.total += dur;
    node.own += dur;
    node.count += 1;
    if (parent === root) root.total += dur;
    else parent.own -= dur;
    const known = operators.get(text) ?? { name: text, count: 0, total: 0, own: 0 };
    // Within itself it would count twice.
    const again = stack.some((one) => one.node.name === text);
    operators.set(text, { ...known, count: known.count + 1, total: known.total + (again ? 0 : dur), own: known.own + dur });
    const around = parent === root ? null : operators.get(parent.name);
    if (around) operators.set(parent.name, { ...around, own: around.own - dur });
    stack.push({ node, end: ts + dur });
  }
}

/** Boxes of a flame picture: `{name, total, count, depth, left, width}`, in shares of the whole. */
export function boxesOf(tree, { narrowest = 0.002, deepest = 24 } = {}) {
  const boxes = [];
  const lay = (node, left, depth) => {
    if (depth >= deepest) return;
    for (const child of [...node.children.values()].sort((a, b) => b.total - a.total)) {
      const width = child.total / tree.total;
      if (width < narrowest) break;
      boxes.push({ name: child.name, total: child.total, count: child.count, depth, left, width });
      lay(child, left, depth + 1);
      left += width;
    }
  };
  lay(tree, 0, 0);
  return boxes;
}
