//! The HTTP server: version 1.1, one request on each connection, bounded in connections, bytes and time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Connections that are served at a time; a further one is closed at once.
pub(super) const CONNECTIONS_MAX: usize = 32;
/// Longest head of a request, in bytes: hyper allows no less.
pub(super) const HEAD_BYTES_MAX: usize = 8 << 10;
/// Most headers of a request.
const HEADERS_MAX: usize = 64;
/// Time in which the head of a request must arrive.
pub(super) const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Time of a connection from its start to its end, with the answer. Longer than processes may take to answer.
pub(super) const CONNECTION_LIMIT: Duration = Duration::from_secs(15);
/// Pause after a connection could not be accepted, so that a lack of file descriptors causes no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An answer: its status, its content type and its text.
pub(super) struct Page {
    pub(super) status: StatusCode,
    pub(super) content_type: &'static str,
    pub(super) text: String,
}

impl Page {
    /// A plain text.
    pub(super) fn plain(status: StatusCode, text: impl Into<String>) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            text: text.into(),
        }
    }
}

/// Serves pages by their paths until the future is dropped.
pub(super) async fn serve<F>(
    listener: TcpListener,
    page: impl Fn(String) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Page> + Send + 'static,
{
    let (open, page) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::new(page));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&open).try_acquire_owned() else {
            tracing::debug!("closed: {CONNECTIONS_MAX} connections are open");
            continue;
        };
        let page = Arc::clone(&page);
        tokio::spawn(async move {
            if timeout(CONNECTION_LIMIT, connection(stream, page.as_ref()))
                .await
                .is_err()
            {
                tracing::debug!("closed: a connection took longer than {CONNECTION_LIMIT:?}");
            }
            drop(permit);
        });
    }
}

async fn connection<F>(stream: TcpStream, page: &(impl Fn(String) -> F + Send + Sync))
where
    F: Future<Output = Page> + Send + 'static,
{
    let service = service_fn(|request: Request<Incoming>| async move {
        let response = match *request.method() {
            Method::GET | Method::HEAD => response(page(request.uri().path().to_owned()).await),
            _ => {
                let text = "only GET and HEAD are served\n";
                let mut refused = response(Page::plain(StatusCode::METHOD_NOT_ALLOWED, text));
                let allowed = HeaderValue::from_static("GET, HEAD");
                refused.headers_mut().insert(ALLOW, allowed);
                refused
            }
        };
        Ok::<_, Infallible>(response)
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "a connection failed");
    }
}

fn response(page: Page) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(page.text)));
    *response.status_mut() = page.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(page.content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests;
