// Decoder for canonical MessagePack as docs/protocol.md specifies it: maps, lists, text, bytes, whole numbers, floats, nil.
//
// - What is not the one encoding of its value is refused: lengths and numbers in their shortest form, keys in order.
// - A float is a `Float`, so that no whole number of a message can be one.

const DEPTH_MAX = 8;
const LONGEST_ASCII = 100;
const reading = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export class Float extends Number {}

export function decode(bytes) {
  const reader = new Reader(bytes);
  const value = reader.value(0);
  if (reader.place !== bytes.length) throw new Error("Bytes follow the end of the message.");
  return value;
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.place = 0;
  }

  take(count) {
    if (count > this.bytes.length - this.place) throw new Error("The message ends in the middle of a value.");
    this.place += count;
    return this.bytes.subarray(this.place - count, this.place);
  }

  unsigned(width) {
    const start = this.place;
    this.take(width);
    return width === 8 ? this.view.getBigUint64(start) : this.view[`getUint${8 * width}`](start);
  }

  // A whole number or a length, which may not have a shorter form.
  shortest(width, beyond) {
    const value = this.unsigned(width);
    if (value <= beyond) throw new Error("A number is not in its shortest form.");
    return number(value);
  }

  negative(width, beyond) {
    const start = this.place;
    this.take(width);
    const value = width === 8 ? this.view.getBigInt64(start) : this.view[`getInt${8 * width}`](start);
    if (value >= -beyond) throw new Error("A number is not in its shortest form.");
    return number(value);
  }

  text(count) {
    const bytes = this.take(count);
    if (count > LONGEST_ASCII || bytes.some((byte) => byte > 127)) return reading.decode(bytes);
    return String.fromCharCode(...bytes);
  }

  list(count, depth) {
    const values = [];
    for (let index = 0; index < count; index++) values.push(this.value(depth + 1));
    return values;
  }

  map(count, depth) {
    const map = new Map();
    let before = null;
    for (let index = 0; index < count; index++) {
      const key = this.value(depth + 1);
      const follows = typeof key === "string" && (before === null || before < key);
      if (!follows) throw new Error("A map has a key that is not text, or not in order.");
      map.set(key, this.value(depth + 1));
      before = key;
    }
    return map;
  }

  value(depth) {
    if (depth > DEPTH_MAX) throw new Error("The message is nested too deeply.");
    const first = this.unsigned(1);
    if (first <= 0x7f) return first;
    if (first <= 0x8f) return this.map(first & 0x0f, depth);
    if (first <= 0x9f) return this.list(first & 0x0f, depth);
    if (first <= 0xbf) return this.text(first & 0x1f);
    if (first >= 0xe0) return first - 256;
    switch (first) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.take(this.unsigned(1));
      case 0xc5: return this.take(this.shortest(2, 0xff));
      case 0xc6: return this.take(this.shortest(4, 0xffff));
      case 0xcb: return new Float(new DataView(this.take(8).slice().buffer).getFloat64(0));
      case 0xcc: return this.shortest(1, 0x7f);
      case 0xcd: return this.shortest(2, 0xff);
      case 0xce: return this.shortest(4, 0xffff);
      case 0xcf: return this.shortest(8, 0xffff_ffff);
      case 0xd0: return this.negative(1, 0x20);
      case 0xd1: return this.negative(2, 0x80);
      case 0xd2: return this.negative(4, 0x8000);
      case 0xd3: return this.negative(8, 0x8000_0000);
      case 0xd9: return this.text(this.shortest(1, 0x1f));
      case 0xda: return this.text(this.shortest(2, 0xff));
      case 0xdb: return this.text(this.shortest(4, 0xffff));
      case 0xdc: return this.list(this.shortest(2, 0x0f), depth);
      case 0xdd: return this.list(this.shortest(4, 0xffff), depth);
      case 0xde: return this.map(this.shortest(2, 0x0f), depth);
      case 0xdf: return this.map(this.shortest(4, 0xffff), depth);
      default: throw new Error(`MessagePack type ${first} is not part of this protocol.`);
    }
  }
}

function number(value) {
  return typeof value === "bigint" && value >= -(2n ** 53n) && value <= 2n ** 53n ? Number(value) : value;
}
