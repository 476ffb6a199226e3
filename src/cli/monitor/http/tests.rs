//! The server against clients that are slow, loud or many. After each of them an ordinary client is served.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A server with the page `/`, and a page that never comes.
async fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    let page = |path: String| async move {
        match path.as_str() {
            "/" => Page::plain(StatusCode::OK, "here\n"),
            "/never" => std::future::pending().await,
            _ => Page::plain(StatusCode::NOT_FOUND, "nothing\n"),
        }
    };
    tokio::spawn(serve(listener, page));
    address
}

async fn connect(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.expect("connects")
}

/// Reads until the server closes.
async fn read(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    let end = async {
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            bytes.extend_from_slice(&buffer[..count]);
        }
    };
    timeout(TEST_TIMEOUT, end).await.expect("closed in time");
    String::from_utf8(bytes).expect("text")
}

async fn answer(address: SocketAddr, request: &str) -> String {
    let mut stream = connect(address).await;
    // The server may refuse a long request before it has read it.
    stream.write_all(request.as_bytes()).await.ok();
    read(&mut stream).await
}

async fn serves(address: SocketAddr) {
    let text = answer(address, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.ends_with("\r\n\r\nhere\n"), "{text}");
}

#[tokio::test]
async fn get_and_head_are_served_and_nothing_else() {
    let address = server().await;
    serves(address).await;
    let head = answer(address, "HEAD / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
    let none = answer(address, "GET /../secret?a HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(none.starts_with("HTTP/1.1 404 Not Found\r\n"), "{none}");
    let post = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9999999\r\n\r\n";
    let post = answer(address, post).await;
    assert!(
        post.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"),
        "{post}"
    );
    assert!(post.contains("allow: GET, HEAD\r\n"), "{post}");
    serves(address).await;
}

#[tokio::test]
async fn long_requests_and_other_bytes_are_refused() {
    let address = server().await;
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(2 * HEAD_BYTES_MAX));
    let many = format!(
        "GET / HTTP/1.1\r\n{}\r\n",
        "a: b\r\n".repeat(HEADERS_MAX + 1)
    );
    for wrong in [long.as_str(), many.as_str(), "\x16\x03\x01\x02\x00\x01"] {
        let text = answer(address, wrong).await;
        assert!(!text.contains("200 OK"), "{text}");
        serves(address).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_sends_nothing_or_slowly_is_closed_in_time() {
    let address = server().await;
    let begun = tokio::time::Instant::now();
    let mut silent = connect(address).await;
    read(&mut silent).await;
    assert!(begun.elapsed() <= HEAD_LIMIT * 2, "{:?}", begun.elapsed());
    let mut slow = connect(address).await;
    let begun = tokio::time::Instant::now();
    for byte in b"GET / HTTP/1.1\r\nhost: aaaaaaaaaaaaaa".chunks(1) {
        if slow.write_all(byte).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    read(&mut slow).await;
    assert!(
        begun.elapsed() < Duration::from_secs(40),
        "{:?}",
        begun.elapsed()
    );
    serves(address).await;
}

#[tokio::test(start_paused = true)]
async fn a_page_that_does_not_come_is_given_up() {
    let address = server().await;
    let begun = tokio::time::Instant::now();
    let text = answer(address, "GET /never HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(text, "");
    assert!(
        begun.elapsed() <= CONNECTION_LIMIT * 2,
        "{:?}",
        begun.elapsed()
    );
    serves(address).await;
}

#[tokio::test]
async fn one_connection_too_many_is_closed_at_once_and_the_next_is_served_when_one_has_ended() {
    let address = server().await;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        open.push(connect(address).await);
    }
    let mut further = connect(address).await;
    assert_eq!(read(&mut further).await, "");
    let mut first = open.remove(0);
    first
        .write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        .await
        .expect("open");
    assert!(read(&mut first).await.contains("here"));
    serves(address).await;
}
