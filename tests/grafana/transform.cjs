// Runs panels' transformations, matchers and units through Grafana's own code.
//
// stdin:  [{frames: [{refId, fields: [{name, type, values}]}], transformations, overrides, series, units}]
// stdout: [{frames: [{name: values}], overridden: [[field names] per override], series: [{name, x, y} or null], unknownUnits}]

const data = require("@grafana/data");

// Grafana's code looks for a browser only once it runs.
globalThis.window = globalThis;
globalThis.navigator ??= {};
globalThis.navigator.languages ??= ["en"];

const transformers = new Map(Object.values(data.standardTransformers).map((t) => [t.id, t]));
data.standardTransformersRegistry.setInit(() =>
  [...transformers.values()].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: async () => transformation,
    defaultOptions: transformation.defaultOptions,
  })),
);

const knownUnits = new Set(data.getValueFormats().flatMap((group) => group.submenu.map((unit) => unit.value)));
const isKnown = (unit) => knownUnits.has(unit) || /^(suffix|prefix|count):\S/.test(unit);

// The first value of an observable; Grafana's transformations give one each.
const first = (observable) => new Promise((resolve, reject) => observable.subscribe({ next: resolve, error: reject }));

// What a chart of kind xychart draws for one series in manual mapping: a frame by index, a field each for x and y.
function drawn(series, frames) {
  const frame = frames[series.frame.matcher.options];
  const find = (matcher) =>
    frame?.fields.find((f) => f.type === "number" && data.getFieldMatcher(matcher)(f, frame, frames));
  const [x, y] = [find(series.x.matcher), find(series.y.matcher)];
  return x && y ? { name: series.name.fixed, x: x.values, y: y.values } : null;
}

async function run({ frames, transformations, overrides, series, units }) {
  const made = frames.map((frame) => data.toDataFrame(frame));
  const result = await first(data.transformDataFrame(transformations, made));
  const nameOf = (field, frame) => data.getFieldDisplayName(field, frame, result);
  return {
    frames: result.map((frame) => Object.fromEntries(frame.fields.map((f) => [nameOf(f, frame), f.values]))),
    overridden: overrides.map(({ matcher }) =>
      result.flatMap((frame) =>
        frame.fields.filter((f) => data.getFieldMatcher(matcher)(f, frame, result)).map((f) => nameOf(f, frame)),
      ),
    ),
    series: series.map((one) => drawn(one, result)),
    unknownUnits: units.filter((unit) => !isKnown(unit)),
  };
}

async function main() {
  const chunks = [];
  for await (const chunk of process.stdin) chunks.push(chunk);
  const results = [];
  for (const job of JSON.parse(Buffer.concat(chunks).toString())) results.push(await run(job));
  process.stdout.write(JSON.stringify(results));
}

main();
