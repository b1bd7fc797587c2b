// Two answers to one question, side by side, with the first token that differs.

import { html, useEffect, useState } from "./preact.js";
import { store } from "./core.js";
import { AnswerPart } from "./app.js";
import { firstDifference } from "./tokens.js";

function summary({ answer, other }) {
  const at = firstDifference(answer, other);
  if (at >= 0) return `The answers differ from token ${at + 1} on.`;
  return answer.isOpen || other.isOpen ? "The answers are equal so far." : "The answers are equal.";
}

export default function Compare({ turn }) {
  const [, setCount] = useState(0);
  const { answer, other } = turn;
  useEffect(() => {
    const listener = () => setCount((count) => count + 1);
    for (const one of [answer, other]) one.listeners.add(listener);
    return () => [answer, other].forEach((one) => one.listeners.delete(listener));
  }, [answer, other]);
  return html`<p class="difference" role="status">${summary(turn)}</p>
    <div class="pair">
      <section aria-label="Answer A"><h2>A</h2>
        <${AnswerPart} answer=${answer} settings=${store.settings.compare} otherAnswer=${other} isLast=${true} /></section>
      <section aria-label="Answer B"><h2>B</h2>
        <${AnswerPart} answer=${other} settings=${store.settingsB} otherAnswer=${answer} /></section>
    </div>`;
}
