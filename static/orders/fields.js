// The fields of a form, by their type.
import { html, useState } from "../core/html.js";
import { bytes, count } from "../parts/words.js";

export function Field({ field, value, onChange, fault, id }) {
  const hint = fault ?? field.hint;
  const described = hint ? `${id}-hint` : undefined;
  const more = { id, "aria-describedby": described, "aria-invalid": fault ? "true" : undefined };
  const said = hint && html`<p class="hint ${fault ? "fault" : ""}" id="${id}-hint">${hint}</p>`;
  switch (field.type) {
    case "choice":
      return html`<fieldset class="field" aria-describedby=${described}><legend>${field.label}</legend>
        ${field.options.map((one) => html`<label class="option" key=${one.value}>
          <input type="radio" name=${id} value=${one.value} checked=${value === one.value} onChange=${() => onChange(one.value)} />
          <span>${one.label}</span></label>`)}${said}</fieldset>`;
    case "many":
      return html`<fieldset class="field" aria-describedby=${described}><legend>${field.label}</legend>
        ${field.options.map((one) => html`<label class="option" key=${one.value}>
          <input type="checkbox" checked=${value.includes(one.value)} disabled=${field.fixed}
            onChange=${(event) => onChange(event.target.checked ? [...value, one.value] : value.filter((other) => other !== one.value))} />
          <span>${one.label}</span></label>`)}${said}</fieldset>`;
    case "flag":
      return html`<div class="field"><label class="option"><input type="checkbox" ...${more} checked=${value}
        onChange=${(event) => onChange(event.target.checked)} /><span>${field.label}</span></label>${said}</div>`;
    case "lines":
      return html`<div class="field"><label for=${id}>${field.label}</label>
        <textarea ...${more} class="mono" rows="3" spellcheck="false" value=${value} onInput=${(event) => onChange(event.target.value)}></textarea>${said}
        ${field.fill && html`<${Pick} id="${id}-fill" label="Or take them from a safetensors file" read=${field.fill} onRead=${onChange} />`}</div>`;
    case "file":
      return html`<div class="field"><${Pick} id=${id} label=${field.label} read=${field.read} onRead=${onChange} held=${value} />${said}</div>`;
    default:
      return html`<div class="field"><label for=${id}>${field.label}</label>
        <input ...${more} type="text" inputmode=${field.type === "number" ? "decimal" : undefined} class=${field.mono ? "mono" : ""} maxlength=${field.most}
          autocomplete="off" spellcheck="false" value=${value} onInput=${(event) => onChange(event.target.value)} />${said}</div>`;
  }
}

/** A file that is read at once, here, and never as such sent anywhere. */
function Pick({ id, label, read, onRead, held }) {
  const [said, say] = useState("");
  const pick = async (event) => {
    const [file] = event.target.files;
    if (!file) return;
    say("Reading …");
    try {
      onRead(await read(file));
      say("");
    } catch (failed) {
      onRead(held === undefined ? "" : null);
      say(failed.message);
    }
  };
  return html`<label class="pick-file" for=${id}>${label}</label><input id=${id} type="file" accept=".safetensors" aria-describedby="${id}-said" onChange=${pick} />
    <p class="hint" id="${id}-said" role="status">${said || (held ? `${count(held.tensors.length, "tensor")}, ${bytes(held.bytes)}` : "")}</p>`;
}
