"use strict";
// Markdown as models write it, made into nodes. Text only ever becomes text: nothing here parses HTML, sets a style, loads
// an image or runs what an answer says. The work is about linear in the text, and nesting has an end.

const showMarkdown = (() => {
  const DEEPEST = 12;
  const BULLET = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
  const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
  const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
  const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
  const QUOTE = /^ {0,3}> ?/;

  const element = (tag, children = [], className = "") => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  };
  const isBlank = (line) => !line.trim();
  const indentOf = (line) => line.length - line.trimStart().length;
  const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || (BULLET.test(line) && !/^ *\d{2,}[.)]/.test(line) && !/^ *(?:[-*+]|\d[.)])\s*$/.test(line));

  // -- blocks: [{kind, first, last (exclusive), ...}] of lines ---------------------------------------------------------

  function splitBlocks(lines) {
    const found = [];
    for (let i = 0; i < lines.length;) {
      if (isBlank(lines[i])) {
        i++;
        continue;
      }
      const block = readFence(lines, i) || readHeading(lines, i) || readRule(lines, i) || readQuote(lines, i)
        || readList(lines, i) || readTable(lines, i) || readIndented(lines, i) || readParagraph(lines, i);
      block.raw = lines.slice(i, block.last).join("\n");
      found.push(block);
      i = block.last;
    }
    return found;
  }

  function readFence(lines, first) {
    const match = FENCE.exec(lines[first]);
    if (!match) return null;
    const indent = indentOf(lines[first]);
    const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}[ \\t]*$`);
    let last = first + 1;
    while (last < lines.length && !end.test(lines[last])) last++;
    const text = lines.slice(first + 1, last).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
    return {kind: "code", text, language: match[2].trim().split(/\s/)[0], last: Math.min(last + 1, lines.length)};
  }

  function readHeading(lines, first) {
    const match = HEADING.exec(lines[first]);
    if (!match) return null;
    const text = lines[first].slice(match[0].length).trim();
    const closing = text.length - /#*$/.exec(text)[0].length;
    const isClosed = closing === 0 || /\s/.test(text[closing - 1]);
    return {kind: "heading", level: match[1].length, text: isClosed ? text.slice(0, closing).trim() : text, last: first + 1};
  }

  function readRule(lines, first) {
    return RULE.test(lines[first]) ? {kind: "rule", last: first + 1} : null;
  }

  function readQuote(lines, first) {
    if (!QUOTE.test(lines[first])) return null;
    const inner = [];
    let last = first;
    for (; last < lines.length && !isBlank(lines[last]); last++) {
      if (!QUOTE.test(lines[last]) && startsBlock(lines[last])) break;
      inner.push(lines[last].replace(QUOTE, ""));
    }
    return {kind: "quote", lines: inner, last};
  }

  function readList(lines, first) {
    const match = BULLET.exec(lines[first]);
    if (!match || match[1].length > 3 || RULE.test(lines[first])) return null;
    const sort = match[2].at(-1);
    const items = [];
    let isLoose = false;
    let item = null;
    let i = first;
    for (; i < lines.length; i++) {
      const line = lines[i];
      const indent = indentOf(line);
      const bullet = BULLET.exec(line);
      if (isBlank(line)) {
        if (item) item.lines.push("");
        continue;
      }
      // Models indent a list inside "1." by two or three blanks: both are inside.
      const isInside = item && (indent >= item.width || (bullet && indent >= item.indent + 2));
      if (isInside) {
        item.lines.push(line.slice(Math.min(indent, item.width)));
      } else if (bullet && bullet[2].at(-1) === sort && indent <= 3 + match[1].length && !RULE.test(line)) {
        if (item && item.lines.at(-1) === "") isLoose = true;
        const width = bullet[0].length - bullet[1].length - bullet[2].length > 4 ? indent + bullet[2].length + 1
          : Math.max(bullet[0].length, indent + bullet[2].length + 1);
        item = {indent, width, lines: [line.slice(width)]};
        items.push(item);
      } else if (item.lines.at(-1) !== "" && !startsBlock(line)) {
        item.lines.push(line.trimStart());
      } else {
        break;
      }
    }
    while (isBlank(lines[i - 1])) i--;
    const number = parseInt(match[2], 10);
    return {kind: "list", start: Number.isNaN(number) ? null : number, items: items.map((one) => one.lines), isLoose, last: i};
  }

  function cellsOf(line) {
    const text = line.trim().replace(/^\|/, "");
    const cells = [];
    let cell = "";
    for (let i = 0; i < text.length; i++) {
      if (text[i] === "\\" && text[i + 1] === "|") {
        cell += "|";
        i++;
      } else if (text[i] === "|") {
        cells.push(cell.trim());
        cell = "";
      } else {
        cell += text[i];
      }
    }
    if (cell.trim()) cells.push(cell.trim());
    return cells;
  }

  function readTable(lines, first) {
    if (first + 1 >= lines.length || !lines[first].includes("|") || !lines[first + 1].includes("-")) return null;
    const head = cellsOf(lines[first]);
    const marks = cellsOf(lines[first + 1]);
    if (head.length !== marks.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
    const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
    const rows = [];
    let last = first + 2;
    for (; last < lines.length && lines[last].includes("|"); last++) rows.push(cellsOf(lines[last]));
    return {kind: "table", head, sides, rows, last};
  }

  function readIndented(lines, first) {
    if (indentOf(lines[first]) < 4) return null;
    let last = first;
    while (last < lines.length && (isBlank(lines[last]) || indentOf(lines[last]) >= 4)) last++;
    while (isBlank(lines[last - 1])) last--;
    return {kind: "code", text: lines.slice(first, last).map((line) => line.slice(4)).join("\n"), language: "", last};
  }

  function readParagraph(lines, first) {
    let last = first + 1;
    while (last < lines.length && !isBlank(lines[last]) && !startsBlock(lines[last]) && !readTable(lines, last)) last++;
    return {kind: "paragraph", text: lines.slice(first, last).map((line) => line.trimStart()).join("\n"), last};
  }

  // -- inline ----------------------------------------------------------------------------------------------------------

  function safeAddress(text) {
    try {
      const address = new URL(text);
      return ["http:", "https:", "mailto:"].includes(address.protocol) ? address.href : null;
    } catch {
      return null;
    }
  }

  function link(address, children) {
    const node = element("a", children);
    node.href = address;
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
    return node;
  }

  // The place of the bracket that closes the one at `at`, or -1. Labels are short, which bounds the work.
  function closingBracket(text, at) {
    const end = Math.min(text.length, at + 1000);
    for (let i = at, depth = 0; i < end; i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === "[") depth++;
      else if (text[i] === "]" && --depth === 0) return i;
    }
    return -1;
  }

  const TARGET = /\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
  const BARE = /https?:\/\/[^\s<>"'`*|\\]+/y;
  const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
  const BREAK = /<br\s*\/?>/iy;
  const matchAt = (pattern, text, at) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };

  // Pieces of a line: nodes and texts, and runs of * _ ~ that may open or close.
  function inline(text, mayLink = true) {
    const pieces = [];
    const unclosed = new Set(); // lengths of runs of backticks that have no partner
    let plain = "";
    const flush = () => {
      if (plain) pieces.push(document.createTextNode(plain));
      plain = "";
    };
    const put = (node, next) => {
      flush();
      pieces.push(node);
      return next;
    };
    for (let i = 0; i < text.length;) {
      const c = text[i];
      let match;
      if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] || "")) {
        plain += text[i + 1];
        i += 2;
      } else if (c === "\n") {
        plain = plain.trimEnd();
        i = put(element("br"), i + 1);
      } else if (c === "`") {
        const ticks = matchAt(/`+/y, text, i)[0];
        const end = unclosed.has(ticks.length) ? -1 : closingTicks(text, i + ticks.length, ticks.length);
        if (end < 0) {
          unclosed.add(ticks.length);
          plain += ticks;
          i += ticks.length;
        } else {
          let code = text.slice(i + ticks.length, end).replaceAll("\n", " ");
          if (code.trim() && code.startsWith(" ") && code.endsWith(" ")) code = code.slice(1, -1);
          i = put(element("code", [code]), end + ticks.length);
        }
      } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
        const open = c === "[" ? i : i + 1;
        const close = mayLink ? closingBracket(text, open) : -1;
        const target = close > 0 && text[close + 1] === "(" ? matchAt(TARGET, text, close + 1) : null;
        const address = target && safeAddress(target[1]);
        if (address) {
          const label = text.slice(open + 1, close);
          i = put(link(address, label ? inline(label, false) : [address]), close + 1 + target[0].length);
        } else {
          plain += c;
          i++;
        }
      } else if (c === "<" && mayLink && (match = matchAt(ANGLE, text, i)) && safeAddress(match[1])) {
        i = put(link(safeAddress(match[1]), [match[1]]), i + match[0].length);
      } else if (c === "<" && (match = matchAt(BREAK, text, i))) {
        i = put(element("br"), i + match[0].length);
      } else if (c === "h" && (match = matchAt(BARE, text, i)) && mayLink && !/\w/.test(plain.at(-1) || "")) {
        let address = match[0].replace(/[.,:;!?_~]+$/, "");
        while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
        i = put(safeAddress(address) ? link(safeAddress(address), [address]) : address, i + address.length);
      } else if (c === "*" || c === "_" || c === "~") {
        const run = matchAt(/\*+|_+|~+/y, text, i)[0];
        const before = text[i - 1] || " ";
        const after = text[i + run.length] || " ";
        i = put(delimiter(run, before, after), i + run.length);
      } else {
        plain += c;
        i++;
      }
    }
    flush();
    return paired(pieces);
  }

  function closingTicks(text, from, length) {
    for (let i = text.indexOf("`", from); i >= 0; i = text.indexOf("`", i)) {
      const run = matchAt(/`+/y, text, i)[0].length;
      if (run === length) return i;
      i += run;
    }
    return -1;
  }

  function delimiter(run, before, after) {
    const isSpace = (c) => /\s/.test(c);
    const isMark = (c) => /[\p{P}\p{S}]/u.test(c);
    const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
    const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
    const isWord = run[0] === "_";
    return {
      run: run[0], n: run.length, opens: left && (!isWord || !right || isMark(before)),
      closes: right && (!isWord || !left || isMark(after)),
    };
  }

  // Pair the runs, inner ones first, as CommonMark does.
  function paired(pieces) {
    const out = [];
    const openers = []; // places in `out`
    for (const piece of pieces) {
      if (piece.run === undefined) {
        out.push(piece);
        continue;
      }
      const mark = {...piece};
      while (mark.closes && mark.n > 0) {
        let k = openers.length - 1;
        while (k >= 0 && !(out[openers[k]].run === mark.run && (mark.run !== "~" || out[openers[k]].n === mark.n))) k--;
        if (k < 0) break;
        const at = openers[k];
        const opener = out[at];
        const n = mark.run === "~" ? mark.n : Math.min(2, mark.n, opener.n);
        if (n > 2) break;
        const children = out.splice(at + 1).map(asNode);
        openers.length = k + 1;
        out.push(element(mark.run === "~" ? "del" : n === 2 ? "strong" : "em", children));
        opener.n -= n;
        mark.n -= n;
        if (opener.n === 0) {
          out.splice(at, 1);
          openers.pop();
        }
      }
      if (mark.n > 0) {
        // Runs that never find their end would make the search above slow.
        if (mark.opens && openers.length < 200) openers.push(out.length);
        out.push(mark);
      }
    }
    return out.map(asNode);
  }

  const asNode = (piece) => (piece.run === undefined ? piece : document.createTextNode(piece.run.repeat(piece.n)));

  // -- nodes -----------------------------------------------------------------------------------------------------------

  function nodeOf(block, depth) {
    switch (block.kind) {
      case "code": return codeNode(block);
      case "heading": return element(`h${Math.min(5, block.level + 2)}`, inline(block.text));
      case "rule": return element("hr");
      case "quote": return element("blockquote", nodesOf(block.lines, depth + 1));
      case "list": return listNode(block, depth);
      case "table": return tableNode(block);
      default: return element("p", inline(block.text));
    }
  }

  function nodesOf(lines, depth) {
    if (depth > DEEPEST) return [element("p", [lines.join("\n")])];
    return splitBlocks(lines).map((block) => nodeOf(block, depth));
  }

  function codeNode({text, language}) {
    const copy = element("button", ["Copy"]);
    copy.type = "button";
    copy.dataset.copy = "code";
    copy.setAttribute("aria-label", language ? `Copy the ${language} code` : "Copy the code");
    const pre = element("pre", [element("code", [text])]);
    pre.tabIndex = 0; // so that keys can scroll it
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", language ? `${language} code` : "Code");
    return element("div", [element("div", [element("span", [language || "code"]), copy]), pre], "code");
  }

  function listNode({start, items, isLoose}, depth) {
    const list = element(start === null ? "ul" : "ol");
    if (start !== null && start !== 1) list.start = start;
    for (const lines of items) {
      const task = /^\[([ xX])\] +/.exec(lines[0]);
      if (task) lines[0] = lines[0].slice(task[0].length);
      let nodes = nodesOf(lines, depth + 1);
      if (!isLoose) nodes = nodes.flatMap((node) => (node.localName === "p" ? [...node.childNodes] : [node]));
      const item = element("li", nodes, task ? "task" : "");
      if (task) {
        const box = element("input");
        box.type = "checkbox";
        box.disabled = true;
        box.checked = task[1] !== " ";
        (isLoose && item.firstElementChild?.localName === "p" ? item.firstElementChild : item).prepend(box);
      }
      list.append(item);
    }
    return list;
  }

  function tableNode({head, sides, rows}) {
    const row = (cells, tag) => element("tr", sides.map((side, i) => {
      const cell = element(tag, inline(cells[i] || ""), side);
      if (tag === "th") cell.scope = "col";
      return cell;
    }));
    const table = element("table", [element("thead", [row(head, "th")]), element("tbody", rows.map((cells) => row(cells, "td")))]);
    const box = element("div", [table], "table");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Table");
    return box;
  }

  // Lines, their indentation in blanks, except in fenced code, where a tab is a tab.
  function linesOf(text) {
    let isCode = false;
    return text.replace(/\r\n?/g, "\n").split("\n").map((line) => {
      if (/^\s*(?:```|~~~)/.test(line)) isCode = !isCode;
      else if (!isCode) return line.replace(/^\s+/, (space) => space.replaceAll("\t", "    "));
      return line;
    });
  }

  // What a container shows, so that the next text of a stream only makes the blocks anew that changed.
  const shown = new WeakMap();

  return (container, text) => {
    const blocks = splitBlocks(linesOf(text));
    const before = shown.get(container) || [];
    let same = 0;
    while (same < before.length && same < blocks.length && before[same].raw === blocks[same].raw
      && before[same].kind === blocks[same].kind) same++;
    const last = container.children[same];
    const growing = blocks[same];
    if (last && growing?.kind === "code" && before[same].kind === "code" && before[same].language === growing.language) {
      // Focus, selection and scroll position stay.
      const code = last.querySelector("code");
      const old = before[same].text;
      if (old && code.firstChild && growing.text.startsWith(old)) code.firstChild.appendData(growing.text.slice(old.length));
      else code.textContent = growing.text;
      same++;
    }
    while (container.children.length > same) container.lastElementChild.remove();
    container.append(...blocks.slice(same).map((block) => nodeOf(block, 0)));
    shown.set(container, blocks);
  };
})();
