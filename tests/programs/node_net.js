/*
 * Node's networking: `node node_net.js server` prints "ports JSON" and serves until it is ended, `node node_net.js client JSON`
 * uses it and prints a line "ok NAME" or "failed NAME: REASON" for each case.
 */
'use strict';
const { fork } = require('child_process');
const cluster = require('cluster');
const { createHash } = require('crypto');
const http = require('http');
const net = require('net');

const host = '127.0.0.1';
const sha = (data) => createHash('sha256').update(data).digest('hex');

/* Bytes that look random and are the same everywhere. */
function bytes(size, seed) {
  const data = Buffer.alloc(size);
  let x = seed >>> 0;
  for (let i = 0; i < size; i++) {
    x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
    data[i] = x >>> 24;
  }
  return data;
}

const listen = (server) => new Promise((resolve) => server.listen(0, host, () => resolve(server.address().port)));

function httpServer() {
  return http.createServer((request, response) => {
    const hash = createHash('sha256');
    request.on('data', (chunk) => hash.update(chunk)).on('end', () => {
      const size = Number(new URL(request.url, 'http://x').searchParams.get('size'));
      response.setHeader('x-digest', hash.digest('hex'));
      response.setHeader('x-pid', process.pid);
      response.end(bytes(size, size));
    });
  });
}

async function server() {
  if (!cluster.isPrimary) {
    const web = httpServer();
    web.keepAliveTimeout = 60000;
    return void process.send({ port: await listen(web) });
  }
  const web = httpServer();
  web.keepAliveTimeout = 60000;
  const echo = net.createServer({ allowHalfOpen: true }, (socket) => socket.pipe(socket));
  const helper = fork(__filename, ['helper']);
  /* Each connection goes to another process before a byte was read, or after the first ones. */
  const passed = net.createServer({ pauseOnConnect: true }, (socket) => helper.send('echo', socket));
  const used = net.createServer((socket) => {
    let count = 0;
    socket.on('data', function pong(data) {
      socket.write(data);
      if ((count += data.length) < 20 * 100) return;
      socket.removeListener('data', pong);
      socket.pause();
      helper.send('greet', socket);
    });
  });
  const workers = [cluster.fork(), cluster.fork()];
  const shared = await Promise.all(workers.map((w) => new Promise((resolve) => w.once('message', (m) => resolve(m.port)))));
  const ports = { web: await listen(web), echo: await listen(echo), passed: await listen(passed), used: await listen(used),
    cluster: shared[0], same: shared[0] === shared[1] };
  console.log(`ports ${JSON.stringify(ports)}`);
}

function helper() {
  process.on('message', (what, socket) => {
    if (!socket) return;
    if (what === 'greet') socket.write(bytes(100, 4));
    socket.pipe(socket);
    socket.resume();
  });
}

function check(condition, what) {
  if (!condition) throw new Error(what);
}

const request = (agent, port, size, body) => new Promise((resolve, reject) => {
  const options = { host, port, agent, path: `/?size=${size}`, method: body ? 'POST' : 'GET' };
  const call = http.request(options, (answer) => {
    const chunks = [];
    answer.on('error', reject).on('data', (chunk) => chunks.push(chunk)).on('end', () => {
      const got = Buffer.concat(chunks);
      if (got.length !== size || sha(got) !== sha(bytes(size, size))) return reject(new Error(`body of ${size} differs`));
      if (answer.headers['x-digest'] !== sha(body || Buffer.alloc(0))) return reject(new Error('request body differs'));
      resolve({ pid: answer.headers['x-pid'], from: call.socket.localPort });
    });
  });
  call.on('error', reject).end(body);
});

/* Sends all, reads it back, and the end of the stream after it. `lead`: so many messages of 100 bytes to and fro before, the last
   of which the next owner of the other end answers. */
const echoed = (port, data, lead = 0) => new Promise((resolve, reject) => {
  const socket = net.connect({ host, port, allowHalfOpen: true });
  const chunks = [];
  const small = bytes(100, 3);
  let count = 0;
  socket.on('connect', () => (lead ? socket.write(small) : socket.end(data)));
  socket.on('data', (chunk) => {
    chunks.push(chunk);
    count += chunk.length;
    if (count < (lead - 1) * 100 && count % 100 === 0) socket.write(small);
    else if (count === lead * 100) socket.end(data);
  });
  socket.on('error', reject).on('end', () => {
    const got = Buffer.concat(chunks).subarray(lead * 100);
    if (got.length !== data.length || sha(got) !== sha(data)) reject(new Error(`${got.length} of ${data.length} bytes`));
    else resolve();
  });
});

const cases = {
  async 'http-keep-alive'(ports) {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });
    const answers = await Promise.all([...Array(200).keys()].map((i) => request(agent, ports.web, i * 37)));
    const from = new Set(answers.map((answer) => answer.from));
    check(from.size <= 4, `${from.size} connections for 4 that are kept alive`);
    agent.destroy();
  },
  async 'http-bodies'(ports) {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 2 });
    await Promise.all([1, 70000, 3000000].map((size) => request(agent, ports.web, size, bytes(size, 9))));
    agent.destroy();
  },
  async 'http-close'(ports) {
    for (let i = 0; i < 40; i++) await request(false, ports.web, 20000, bytes(3000, i));
  },
  async 'net-echo'(ports) {
    await Promise.all([1, 2, 3].map((i) => echoed(ports.echo, bytes(1 << 20, i))));
  },
  async cluster(ports) {
    check(ports.same, 'the workers have different ports');
    const agents = [...Array(8)].map(() => new http.Agent({ keepAlive: true, maxSockets: 1 }));
    const pids = new Set();
    await Promise.all(agents.map(async (agent) => {
      for (let i = 0; i < 30; i++) pids.add((await request(agent, ports.cluster, 5000, bytes(5000, i))).pid);
    }));
    /* Where the workers have the listener itself, the kernel chooses. */
    check(pids.size === 2 || process.env.NODE_CLUSTER_SCHED_POLICY === 'none', `${pids.size} workers answered`);
    agents.forEach((agent) => agent.destroy());
  },
  async 'socket-to-child'(ports) {
    await Promise.all([1, 2, 3].map((i) => echoed(ports.passed, bytes(300000, i))));
  },
  async 'used-socket-to-child'(ports) {
    await Promise.all([1, 2, 3].map((i) => echoed(ports.used, bytes(300000, i), 21)));
  },
};

async function client(ports) {
  for (const [name, run] of Object.entries(cases)) {
    let timer;
    const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error('not done after 30 s')), 30000); });
    try {
      await Promise.race([run(ports), late]);
      console.log(`ok ${name}`);
    } catch (error) {
      console.log(`failed ${name}: ${error.message}`);
    }
    clearTimeout(timer);
  }
  process.exit(0);
}

if (process.argv[2] === 'server') server();
else if (process.argv[2] === 'helper') helper();
else client(JSON.parse(process.argv[3]));
