// Files of tensors that a person has at hand: a length, a JSON header of that length, the content.

const DTYPES = {
  F64: "float64", F32: "float32", F16: "float16", BF16: "bfloat16", F8_E4M3: "float8_e4m3fn", F8_E5M2: "float8_e5m2",
  I64: "int64", I32: "int32", I16: "int16", I8: "int8", U8: "uint8", BOOL: "bool",
};
const NOT_ONE = "That is no safetensors file.";

/** `[{name, dtype, shape, begin, end}]` in the order of the content. Throws an Error to be shown. */
async function headerOf(file) {
  const head = new DataView(await file.slice(0, 8).arrayBuffer());
  const length = head.byteLength === 8 ? Number(head.getBigUint64(0, true)) : NaN;
  if (!(length > 0 && 8 + length <= file.size)) throw new Error(NOT_ONE);
  let header;
  try {
    header = JSON.parse(await file.slice(8, 8 + length).text());
  } catch {
    throw new Error(NOT_ONE);
  }
  const named = Object.entries(header).filter(([name]) => name !== "__metadata__");
  const found = named.map(([name, one]) => {
    const [begin, end] = one.data_offsets ?? [];
    if (!DTYPES[one.dtype] || !Array.isArray(one.shape) || !(begin >= 0 && begin <= end && 8 + length + end <= file.size)) throw new Error(NOT_ONE);
    return { name, dtype: DTYPES[one.dtype], shape: one.shape, begin: 8 + length + begin, end: 8 + length + end };
  });
  if (!found.length) throw new Error("There is no tensor in that file.");
  return found.sort((a, b) => a.begin - b.begin);
}

/** As the form's lines have them. */
export async function linesOf(file) {
  return (await headerOf(file)).map(({ name, dtype, shape }) => `${name} ${dtype} ${shape.join("x") || "scalar"}`).join("\n");
}

let read = 0; // two files of one name and size are still two

/** All of a file, as an order carries it; said of it in short wherever it would be written out. */
class Carried {
  constructor(name, bytes, tensors) {
    Object.assign(this, { name, bytes, tensors, number: ++read });
  }

  toJSON() {
    return `file ${this.number}: ${this.name}`;
  }
}

/** Throws an Error to be shown. */
export async function carried(file, most) {
  const found = await headerOf(file);
  const bytes = found.reduce((sum, { begin, end }) => sum + end - begin, 0);
  // In base64 three bytes are four letters.
  if (most && (bytes * 4) / 3 > most) throw new Error(`That is ${bytes} bytes; one order to this engine carries ${Math.floor((most * 3) / 4)} at most.`);
  const tensors = await Promise.all(found.map(async ({ name, dtype, shape, begin, end }) => ({ name, dtype, shape, data: await base64(file.slice(begin, end)) })));
  return new Carried(file.name, bytes, tensors);
}

function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error("The file can't be read."));
    reader.readAsDataURL(blob);
  });
}

/** Of lines `name type shape [more]`, or of a JSON array of such: what they say, or `{fault}`. */
export function tensorsOf(text, more) {
  if (text.trim().startsWith("[")) {
    try {
      return JSON.parse(text);
    } catch {
      return { fault: "The tensors are no valid JSON." };
    }
  }
  const found = [];
  for (const line of text.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const [name, dtype, shape, last, ...rest] = line.split(/\s+/);
    const sizes = shape === "scalar" ? [] : shape?.split("x").map(Number);
    if (rest.length || !/^(scalar|\d+(x\d+)*)$/.test(shape ?? "") || (more ? !/^\d+$/.test(last ?? "") : last !== undefined)) {
      return { fault: `“${line}” is not ${more ? `name type shape ${more}` : "name type shape"}, such as “lm_head.weight bfloat16 256x64${more ? " 0" : ""}”.` };
    }
    found.push({ name, dtype, shape: sizes, ...(more ? { [more]: Number(last) } : {}) });
  }
  return found;
}
