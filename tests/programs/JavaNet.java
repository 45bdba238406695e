import com.sun.net.httpserver.HttpServer;
import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.channels.AsynchronousServerSocketChannel;
import java.nio.channels.AsynchronousSocketChannel;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * Java's networking: "java JavaNet.java server" prints "ports NIO WEB BLOCKING ASYNC" and serves until it is ended;
 * "java JavaNet.java client PORTS" uses it and prints a line "ok NAME" or "failed NAME: REASON" for each case.
 */
public class JavaNet {
    static final InetAddress HOST = InetAddress.getLoopbackAddress();

    static byte[] bytes(int size, long seed) {
        byte[] data = new byte[size];
        new Random(seed).nextBytes(data);
        return data;
    }

    static String sha(byte[] data) throws Exception {
        return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
    }

    static void check(boolean condition, String what) {
        if (!condition) throw new IllegalStateException(what);
    }

    public static void main(String[] words) throws Exception {
        if (words[0].equals("server")) serve();
        else use(Arrays.stream(words, 1, words.length).mapToInt(Integer::parseInt).toArray());
    }

    // --- servers ---

    static void serve() throws Exception {
        ServerSocketChannel nio = ServerSocketChannel.open().bind(new InetSocketAddress(HOST, 0));
        thread(() -> select(nio));
        HttpServer web = HttpServer.create(new InetSocketAddress(HOST, 0), 50);
        web.setExecutor(Executors.newFixedThreadPool(4));
        web.createContext("/", exchange -> {
            try (exchange) {
                byte[] body = exchange.getRequestBody().readAllBytes();
                int size = Integer.parseInt(exchange.getRequestURI().getQuery());
                exchange.getResponseHeaders().add("X-Digest", sha(body));
                exchange.sendResponseHeaders(200, size == 0 ? -1 : size);
                if (size > 0) exchange.getResponseBody().write(bytes(size, size));
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        });
        web.start();
        ServerSocket blocking = new ServerSocket(0, 50, HOST);
        thread(() -> {
            while (true) {
                Socket socket = blocking.accept();
                thread(() -> {
                    try (socket) {
                        socket.getInputStream().transferTo(socket.getOutputStream());
                    }
                    return null;
                });
            }
        });
        AsynchronousServerSocketChannel async = AsynchronousServerSocketChannel.open().bind(new InetSocketAddress(HOST, 0));
        thread(() -> {
            while (true) {
                AsynchronousSocketChannel channel = async.accept().get();
                thread(() -> {
                    ByteBuffer buffer = ByteBuffer.allocateDirect(50_000);
                    while (channel.read(buffer.clear()).get() >= 0) {
                        buffer.flip();
                        while (buffer.hasRemaining()) channel.write(buffer).get();
                    }
                    channel.close();
                    return null;
                });
            }
        });
        System.out.printf("ports %d %d %d %d%n", nio.socket().getLocalPort(), web.getAddress().getPort(), blocking.getLocalPort(),
            ((InetSocketAddress) async.getLocalAddress()).getPort());
    }

    interface Task {
        Object run() throws Exception;
    }

    static Thread thread(Task task) {
        Thread thread = new Thread(() -> {
            try {
                task.run();
            } catch (Exception error) {
                error.printStackTrace();
            }
        });
        thread.start();
        return thread;
    }

    /** Echoes on all connections from one selector; a key waits for room only while there are bytes to send. */
    static Object select(ServerSocketChannel listener) throws Exception {
        Selector selector = Selector.open();
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel channel = listener.accept();
                    if (channel == null) continue;
                    channel.configureBlocking(false);
                    channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(30_000).limit(0));
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer buffer = (ByteBuffer) key.attachment();
                if (!buffer.hasRemaining()) {
                    if (channel.read(buffer.clear()) < 0) {
                        channel.close();
                        continue;
                    }
                    buffer.flip();
                }
                channel.write(buffer);
                key.interestOps(buffer.hasRemaining() ? SelectionKey.OP_WRITE : SelectionKey.OP_READ);
            }
            selector.selectedKeys().clear();
        }
    }

    // --- clients ---

    static void use(int[] ports) throws Exception {
        ExecutorService pool = Executors.newCachedThreadPool();
        one(pool, "nio-messages", () -> messages(ports[0]));
        one(pool, "nio-bulk", () -> bulk(ports[0], 40));
        one(pool, "nio-select-client", () -> selectClient(ports[0]));
        one(pool, "http-keep-alive", () -> web(ports[1], 300, 1000, 100));
        one(pool, "http-bodies", () -> web(ports[1], 4, 3_000_000, 2_000_000));
        one(pool, "blocking-bulk", () -> bulk(ports[2], 10));
        one(pool, "blocking-timeout", () -> timeout(ports[2]));
        one(pool, "async-channel", () -> bulk(ports[3], 10));
        one(pool, "processes-between", () -> processes(ports[0]));
        System.exit(0);
    }

    static void one(ExecutorService pool, String name, Task task) {
        Future<Object> future = pool.submit(task::run);
        try {
            future.get(40, TimeUnit.SECONDS);
            System.out.println("ok " + name);
        } catch (Exception error) {
            System.out.println("failed " + name + ": " + error + " " + error.getCause());
        }
    }

    /** 3000 messages of 1 to 4096 bytes to and fro. */
    static Object messages(int port) throws Exception {
        Random random = new Random(1);
        try (SocketChannel channel = SocketChannel.open(new InetSocketAddress(HOST, port))) {
            for (int i = 0; i < 3000; i++) {
                byte[] data = bytes(1 + random.nextInt(4096), i);
                ByteBuffer out = ByteBuffer.wrap(data), in = ByteBuffer.allocate(data.length);
                while (out.hasRemaining()) channel.write(out);
                while (in.hasRemaining()) check(channel.read(in) >= 0, "ended early");
                check(Arrays.equals(in.array(), data), "message " + i + " differs");
            }
        }
        return null;
    }

    /** Programs are started while bytes move. */
    static Object processes(int port) throws Exception {
        Future<?> bulk = Executors.newSingleThreadExecutor().submit(() -> {
            for (int i = 0; i < 5; i++) bulk(port, 4);
            return null;
        });
        for (int i = 0; i < 15; i++) {
            Process echo = new ProcessBuilder("/bin/echo", "number " + i).start();
            String said = new String(echo.getInputStream().readAllBytes());
            check(echo.waitFor() == 0 && said.equals("number " + i + "\n"), "said " + said);
        }
        return bulk.get();
    }

    /** Connections at once, 1 MB each through the server and back, with a half-close at the end. */
    static Object bulk(int port, int connections) throws Exception {
        List<CompletableFuture<Void>> all = new ArrayList<>();
        for (int i = 0; i < connections; i++) {
            byte[] data = bytes(1_000_000, i);
            all.add(CompletableFuture.runAsync(() -> {
                try (Socket socket = new Socket(HOST, port)) {
                    Thread writer = thread(() -> {
                        OutputStream to = socket.getOutputStream();
                        for (int at = 0; at < data.length; at += 12_345) to.write(data, at, Math.min(12_345, data.length - at));
                        socket.shutdownOutput();
                        return null;
                    });
                    byte[] got = socket.getInputStream().readAllBytes();
                    writer.join();
                    check(sha(got).equals(sha(data)), got.length + " bytes came back, or others");
                } catch (Exception error) {
                    throw new IllegalStateException(error);
                }
            }, Executors.newCachedThreadPool()));
        }
        for (CompletableFuture<Void> one : all) one.get();
        return null;
    }

    /** 20 connections of one selector: gathering writes and scattering reads. */
    static Object selectClient(int port) throws Exception {
        Selector selector = Selector.open();
        int open = 20;
        for (int i = 0; i < open; i++) {
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            boolean connected = channel.connect(new InetSocketAddress(HOST, port));
            int events = connected ? SelectionKey.OP_READ | SelectionKey.OP_WRITE : SelectionKey.OP_CONNECT;
            channel.register(selector, events, new State(i));
        }
        while (open > 0) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                SocketChannel channel = (SocketChannel) key.channel();
                State state = (State) key.attachment();
                if (key.isConnectable() && channel.finishConnect()) key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                if (key.isWritable()) {
                    channel.write(state.out);
                    if (!state.out[1].hasRemaining()) {
                        key.interestOps(SelectionKey.OP_READ);
                        channel.shutdownOutput();
                    }
                }
                if (key.isReadable()) {
                    ByteBuffer head = ByteBuffer.wrap(state.chunk, 0, 10), rest = ByteBuffer.wrap(state.chunk, 10, 9000);
                    long n = channel.read(new ByteBuffer[] {head, rest});
                    if (n >= 0) {
                        state.in.write(state.chunk, 0, (int) n);
                        continue;
                    }
                    check(sha(state.in.toByteArray()).equals(sha(state.data)), state.in.size() + " bytes came back, or others");
                    channel.close();
                    open--;
                }
            }
            selector.selectedKeys().clear();
        }
        return null;
    }

    static class State {
        final byte[] data, chunk = new byte[9010];
        final ByteBuffer[] out;
        final ByteArrayOutputStream in = new ByteArrayOutputStream();

        State(int seed) {
            data = bytes(400_000, seed);
            out = new ByteBuffer[] {ByteBuffer.wrap(data, 0, 100_000), ByteBuffer.wrap(data, 100_000, 300_000)};
        }
    }

    static Object web(int port, int count, int up, int down) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        for (int i = 0; i < count; i++) {
            byte[] body = bytes(up + i, i);
            HttpRequest request = HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + port + "/?" + (down + i)))
                .timeout(Duration.ofSeconds(20)).POST(HttpRequest.BodyPublishers.ofByteArray(body)).build();
            HttpResponse<byte[]> answer = client.send(request, HttpResponse.BodyHandlers.ofByteArray());
            check(answer.headers().firstValue("X-Digest").orElse("").equals(sha(body)), "request " + i + " arrived changed");
            check(sha(answer.body()).equals(sha(bytes(down + i, down + i))), "answer " + i + " differs");
        }
        return null;
    }

    /** A read that times out takes nothing, and the connection goes on. */
    static Object timeout(int port) throws Exception {
        try (Socket socket = new Socket(HOST, port)) {
            socket.setSoTimeout(100);
            socket.setTcpNoDelay(true);
            InputStream in = socket.getInputStream();
            for (int i = 0; i < 10; i++) {
                byte[] data = bytes(5000, i);
                socket.getOutputStream().write(data);
                socket.setSoTimeout(20_000);
                check(Arrays.equals(in.readNBytes(5000), data), "message " + i + " differs");
                socket.setSoTimeout(30);
                try {
                    in.read();
                    throw new IllegalStateException("read without data");
                } catch (java.net.SocketTimeoutException expected) {
                    continue;
                }
            }
        }
        return null;
    }
}
