"""Requests over many connections at once, the answers compared by SHA-256.

http_check.py PORT get PATH DIGEST CONNECTIONS REQUESTS keep|close
http_check.py PORT post PATH SIZE CONNECTIONS REQUESTS keep|close    (the server answers with the body's digest)
"""

import hashlib
import http.client
import random
import sys
import threading


def use(number):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    source = random.Random(number)
    made = 0
    try:
        for _ in range(requests):
            body = source.randbytes(source.randrange(int(what) + 1)) if method == "post" else None
            made += client.sock is None
            client.request(method.upper(), path, body, {} if keep else {"Connection": "close"})
            answer = client.getresponse()
            data = answer.read()
            assert answer.status == 200, f"status {answer.status}: {data[:200]}"
            got, wanted = (data.decode(), hashlib.sha256(body).hexdigest()) if body is not None else (
                hashlib.sha256(data).hexdigest(), what)
            assert got == wanted, f"{got}, not {wanted}; {len(data)} bytes"
        assert made == (1 if keep else requests), f"{made} connections for {requests} requests"
        client.close()
    except Exception as error:  # any is a failure, whose text is the report
        failures.append(f"connection {number}: {error!r}")


failures = []
port, method, path, what, connections, requests, keep = int(sys.argv[1]), *sys.argv[2:5], *map(int, sys.argv[5:7]), sys.argv[7] == "keep"
threads = [threading.Thread(target=use, args=(number,)) for number in range(connections)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("\n".join(failures) or f"ok {connections * requests}")
sys.exit(bool(failures))
