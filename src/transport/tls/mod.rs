//! Credentials of a process, and TLS with them: version 1.3 only, certificates of one private root on both sides, no
//! tickets and no early data.
//!
//! A certificate names its process by a URI (see [`Claims`]). The listening side compares it with the hello; the
//! connecting side takes the leader of its own deployment only.

mod keygen;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::client::Resumption;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{ClientConfig, CommonState, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use webpki::{EndEntityCert, KeyUsage};

use super::{CertificateHolder, Claims, FileRefused, Readers, read_trusted};

pub use keygen::{KeygenError, LEAF_DAYS, ROOT_DAYS, Root, Written};

/// Longest file of credentials in bytes.
const CREDENTIALS_BYTES_MAX: u64 = 64 << 10;
/// The remedy for a file that has no credentials.
const NAME_ANOTHER: &str = "name a file that `kvferry keygen` wrote";
/// Protocol that both sides name in the handshake.
const ALPN: &[u8] = b"kvferry/1";
/// Name of the listening side in its certificate, whatever the address of its machine is.
const LEADER_NAME: &str = "leader.kvferry";

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("credentials {} {problem}: {remedy}", .path.display())]
pub struct CredentialsError {
    /// The file.
    pub path: PathBuf,
    /// The defect found.
    pub problem: String,
    /// How to fix the defect.
    pub remedy: String,
}

/// Certificate, private key and root of one process.
pub struct Credentials {
    claims: Claims,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: Arc<RootCertStore>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({})", self.claims)
    }
}

impl Credentials {
    /// Loads a file that `kvferry keygen` wrote: the certificate, its private key, and the root.
    ///
    /// # Errors
    /// [`CredentialsError`]: a file that others can read, an incomplete one, or a certificate that is not valid now.
    pub fn load(path: &Path) -> Result<Self, CredentialsError> {
        let refuse = |problem: String, remedy: &str| CredentialsError {
            path: path.to_owned(),
            problem,
            remedy: remedy.to_owned(),
        };
        let text = read_trusted(path, Readers::OwnGroups, CREDENTIALS_BYTES_MAX);
        let text = text.map_err(|FileRefused { problem, remedy }| {
            refuse(problem, remedy.as_deref().unwrap_or(NAME_ANOTHER))
        })?;
        let credentials = Self::parse(&text).map_err(|what| refuse(what, NAME_ANOTHER))?;
        match credentials.verify() {
            Ok(()) => Ok(credentials),
            Err(webpki::Error::CertExpired { .. }) => Err(refuse(
                "has expired".to_owned(),
                "run `kvferry keygen DIR --renew`, and copy the new file",
            )),
            Err(error) => Err(refuse(
                format!("is not valid here ({error})"),
                "compare the clocks of both machines, or copy the file again",
            )),
        }
    }

    /// Reads the contents of a file of credentials. Does not check whether the certificate is valid.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let certificates = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|_| "has an unreadable certificate")?;
        let mut certificates = certificates.into_iter();
        let leaf = certificates.next().ok_or("has no certificate")?;
        let mut roots = RootCertStore::empty();
        for root in certificates {
            roots.add(root).map_err(|_| "has an unusable root")?;
        }
        if roots.is_empty() {
            return Err("has no root".to_owned());
        }
        Ok(Self {
            claims: claims_of(&leaf)?,
            chain: vec![leaf],
            key: PrivateKeyDer::from_pem_slice(text).map_err(|_| "has no private key")?,
            roots: Arc::new(roots),
        })
    }

    /// Checks the own certificate with the own root.
    fn verify(&self) -> Result<(), webpki::Error> {
        let usage = match self.claims.holder {
            CertificateHolder::Leader => KeyUsage::server_auth(),
            _ => KeyUsage::client_auth(),
        };
        let algorithms = ring::default_provider().signature_verification_algorithms;
        let leaf = self.chain.first().ok_or(webpki::Error::BadDer)?;
        let leaf = EndEntityCert::try_from(leaf)?;
        let now = UnixTime::now();
        leaf.verify_for_usage(
            algorithms.all,
            &self.roots.roots,
            &[],
            now,
            usage,
            None,
            None,
        )?;
        Ok(())
    }

    /// Contents of the certificate.
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// The listening side of TLS.
    pub(super) fn acceptor(&self) -> Result<TlsAcceptor, String> {
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::clone(&self.roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| error.to_string())?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| error.to_string())?
            .with_client_cert_verifier(verifier)
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| error.to_string())?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// The connecting side of TLS, with the name of the listening one.
    pub(super) fn connector(&self) -> Result<(TlsConnector, ServerName<'static>), String> {
        let provider = Arc::new(ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| error.to_string())?
            .with_root_certificates(Arc::clone(&self.roots))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| error.to_string())?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_early_data = false;
        let name = ServerName::try_from(LEADER_NAME).map_err(|error| error.to_string())?;
        Ok((TlsConnector::from(Arc::new(config)), name))
    }

    /// The claims of the other side after a handshake, which has verified its certificate.
    pub(super) fn claims_of_peer(&self, state: &CommonState) -> Result<Claims, String> {
        if state.alpn_protocol() != Some(ALPN) {
            return Err("the peer names another protocol".to_owned());
        }
        let chain = state.peer_certificates().unwrap_or_default();
        let leaf = chain.first().ok_or("the peer has no certificate")?;
        let claims = claims_of(leaf)?;
        match claims.deployment == self.claims.deployment {
            true => Ok(claims),
            false => Err(format!(
                "{claims} is not of deployment {}",
                self.claims.deployment
            )),
        }
    }
}

/// The only URI of a certificate.
fn claims_of(certificate: &CertificateDer<'_>) -> Result<Claims, String> {
    let parsed = EndEntityCert::try_from(certificate).map_err(|error| error.to_string())?;
    let mut uris = parsed.valid_uri_names();
    match (uris.next(), uris.next()) {
        (Some(uri), None) => uri.parse(),
        _ => Err("holds a certificate that does not name one process".to_owned()),
    }
}
