"""An echo server and a client with many connections, both with asyncio (one epoll set, edge and level by the loop).

    asyncio_echo.py server PORT
    asyncio_echo.py client PORT CONNECTIONS ROUNDS SEED
"""

import asyncio
import hashlib
import random
import sys


async def serve(port):
    async def echo(reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass

    server = await asyncio.start_server(echo, "127.0.0.1", port, backlog=1024)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


async def converse(port, number, rounds, seed, all_there):
    chance = random.Random(seed * 10_000 + number)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await all_there(number)
    sent, got = hashlib.sha256(), hashlib.sha256()
    for _ in range(rounds):
        data = chance.randbytes(int(2 ** chance.uniform(0, 15)))
        sent.update(data)
        writer.write(data)
        got.update(await reader.readexactly(len(data)))
        assert sent.digest() == got.digest(), f"seed {seed}: connection {number} got other bytes"
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def converse_all(port, connections, rounds, seed):
    open_now, everybody = 0, asyncio.Event()

    async def all_there(_):
        nonlocal open_now
        open_now += 1
        if open_now == connections:
            everybody.set()
        await everybody.wait()

    await asyncio.gather(*(converse(port, number, rounds, seed, all_there) for number in range(connections)))
    print("ok", connections, flush=True)


if sys.argv[1] == "server":
    asyncio.run(serve(int(sys.argv[2])))
else:
    asyncio.run(converse_all(*map(int, sys.argv[2:6])))
