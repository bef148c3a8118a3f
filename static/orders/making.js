// What forms of orders are made of.
import { title } from "../parts/words.js";

export const MODES = {
  drain: "Let running requests finish",
  keep: "Freeze running requests until resumed",
  abort: "End running requests",
};

// In the order of their words, which is from the mildest on.
const choices = (values, said = {}) => {
  const place = (value) => Object.keys(said).indexOf(value);
  return [...values].sort((a, b) => place(a) - place(b)).map((value) => ({ value, label: said[value] ?? title(value) }));
};
const first = (values, ...wanted) => wanted.find((one) => values.includes(one)) ?? values[0];
export const number = (text) => (text === "" || text === undefined ? undefined : Number(text));

export function choice(name, label, values, said, ...wanted) {
  return { name, label, type: "choice", options: choices(values, said), value: first(values, ...wanted) };
}

export function many(name, label, values, chosen = values) {
  return { name, label, type: "many", options: choices(values), value: chosen, required: true };
}

export const text = (name, label, more) => ({ name, label, type: "text", value: "", required: true, ...more });
/** `from`: the least it may be; absent: anything above 0. */
export const figure = (name, label, more) => ({ name, label, type: "number", value: "", ...more });
export const flag = (name, label, more) => ({ name, label, type: "flag", value: false, ...more });
export const lines = (name, label, more) => ({ name, label, type: "lines", value: "", required: true, ...more });
