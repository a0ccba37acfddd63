// Decoder for canonical MessagePack as docs/protocol.md specifies it: maps, lists, text, bytes, whole numbers, floats, nil.

const DEPTH_MAX = 8;

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
    const value = width === 8 ? this.view.getBigUint64(start) : this.view[`getUint${8 * width}`](start);
    return number(value);
  }

  signed(width) {
    const start = this.place;
    this.take(width);
    return number(width === 8 ? this.view.getBigInt64(start) : this.view[`getInt${8 * width}`](start));
  }

  text(count) {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(this.take(count));
  }

  list(count, depth) {
    const values = [];
    for (let index = 0; index < count; index++) values.push(this.value(depth + 1));
    return values;
  }

  map(count, depth) {
    const map = new Map();
    for (let index = 0; index < count; index++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string" || map.has(key)) throw new Error("A map has a duplicate key, or a key that is not text.");
      map.set(key, this.value(depth + 1));
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
      case 0xc4: case 0xc5: case 0xc6: return this.take(this.unsigned(1 << (first - 0xc4)));
      case 0xcb: return new DataView(this.take(8).slice().buffer).getFloat64(0);
      case 0xcc: case 0xcd: case 0xce: case 0xcf: return this.unsigned(1 << (first - 0xcc));
      case 0xd0: case 0xd1: case 0xd2: case 0xd3: return this.signed(1 << (first - 0xd0));
      case 0xd9: case 0xda: case 0xdb: return this.text(this.unsigned(1 << (first - 0xd9)));
      case 0xdc: case 0xdd: return this.list(this.unsigned(2 << (first - 0xdc)), depth);
      case 0xde: case 0xdf: return this.map(this.unsigned(2 << (first - 0xde)), depth);
      default: throw new Error(`MessagePack type ${first} is not part of this protocol.`);
    }
  }
}

function number(value) {
  return typeof value === "bigint" && value >= -(2n ** 53n) && value <= 2n ** 53n ? Number(value) : value;
}
