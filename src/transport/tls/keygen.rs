//! Makes the root of a deployment, and the certificates of its processes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use webpki::EndEntityCert;

use super::LEADER_NAME;
use crate::{CertificateHolder, Claims, OtherUsers, OwnDirectory, TransportError, prepare_for};
use kvferry_session::check_deployment;

/// Days for which a root is valid.
pub const ROOT_DAYS: u32 = 3650;
/// Days for which a certificate of a process is valid, unless `--days` says otherwise.
pub const LEAF_DAYS: u32 = 365;
/// Certificates are valid from this long before they are made, because clocks of machines differ.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
/// File of the root's certificate.
const ROOT_CERTIFICATE: &str = "root.pem";
/// File of the root's private key, which signs; processes never need it.
const ROOT_KEY: &str = "root.key";
/// Name of a new deployment that is given none.
const DEPLOYMENT: &str = "kvferry";
const ROOT_PATH: &str = "/root";

/// Why keys were not made.
#[derive(Debug, thiserror::Error)]
pub enum KeygenError {
    /// The directory cannot be used.
    #[error("{0}")]
    Directory(#[from] TransportError),
    /// The name of the deployment is not one.
    #[error("{0}")]
    Deployment(String),
    /// A root of another deployment is there.
    #[error("{} holds the root of deployment {found}, not {asked}: name another directory, or that deployment", .directory.display())]
    OtherDeployment {
        /// The directory.
        directory: PathBuf,
        /// Deployment of the root that is there.
        found: String,
        /// Deployment that was asked for.
        asked: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// A file of the root does not hold what it should.
    #[error("{} {problem}: restore it, or make a new deployment in another directory", .path.display())]
    Root {
        /// The file.
        path: PathBuf,
        /// The defect found.
        problem: &'static str,
    },
    /// A certificate or key was not made.
    #[error("a certificate cannot be made: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// Result of [`Root::write`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The file is new, or was renewed.
    New(PathBuf),
    /// The file was there, and is unchanged.
    Kept(PathBuf),
}

/// The root of a deployment, which signs the certificates of its processes.
pub struct Root {
    directory: OwnDirectory,
    deployment: String,
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Root {
    /// Opens the root in a directory, or makes directory and root.
    ///
    /// # Errors
    /// [`KeygenError`]: a directory that others can access, the root of another deployment, or a damaged one.
    pub fn open_or_make(directory: &Path, deployment: Option<&str>) -> Result<Self, KeygenError> {
        let new = deployment.unwrap_or(DEPLOYMENT);
        check_deployment(new).map_err(KeygenError::Deployment)?;
        let directory = prepare_for(directory, &OtherUsers::default())?;
        let certificate_path = directory.path().join(ROOT_CERTIFICATE);
        let (key, certificate) = match directory.contains(ROOT_KEY) {
            true => (
                KeyPair::from_pem(&read(&directory, ROOT_KEY)?)?,
                read(&directory, ROOT_CERTIFICATE)?,
            ),
            false => {
                let key = KeyPair::generate()?;
                let certificate = root_parameters(new)?.self_signed(&key)?.pem();
                // The certificate first: without the key, this is repeated.
                write(&directory, ROOT_CERTIFICATE, certificate.as_bytes())?;
                write(&directory, ROOT_KEY, key.serialize_pem().as_bytes())?;
                (key, certificate)
            }
        };
        let damaged = |problem| KeygenError::Root {
            path: certificate_path.clone(),
            problem,
        };
        let found = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| damaged("holds no certificate"))?;
        let parsed =
            EndEntityCert::try_from(&found).map_err(|_| damaged("holds no certificate"))?;
        let uri = parsed.valid_uri_names().next();
        let found = uri
            .and_then(|uri| uri.strip_prefix("kvferry://")?.strip_suffix(ROOT_PATH))
            .ok_or_else(|| damaged("names no deployment"))?;
        if let Some(asked) = deployment.filter(|asked| *asked != found) {
            return Err(KeygenError::OtherDeployment {
                directory: directory.path().to_owned(),
                found: found.to_owned(),
                asked: asked.to_owned(),
            });
        }
        let issuer = Issuer::new(root_parameters(found)?, key);
        Ok(Self {
            deployment: found.to_owned(),
            directory,
            certificate,
            issuer,
        })
    }

    /// Writes the credentials of a process, valid for `days`, as `HOLDER.pem`, with `-` for each `/`. A file that is
    /// there is kept, unless `renew` is set.
    ///
    /// # Errors
    /// [`KeygenError`]: the file cannot be written.
    pub fn write(
        &self,
        holder: CertificateHolder,
        days: u32,
        renew: bool,
    ) -> Result<Written, KeygenError> {
        let name = format!("{}.pem", holder.to_string().replace('/', "-"));
        let path = self.directory.path().join(&name);
        if self.directory.contains(&name) && !renew {
            return Ok(Written::Kept(path));
        }
        let from = since_1970().saturating_sub(CLOCK_SKEW);
        let until = since_1970().saturating_add(DAY * days);
        let credentials = self.issue(holder, from, until)?;
        write(&self.directory, &name, credentials.as_bytes())?;
        Ok(Written::New(path))
    }

    /// Makes the credentials of a process, valid between two times since 1970: its certificate, its private key and
    /// the root's certificate.
    ///
    /// # Errors
    /// [`KeygenError::Certificate`].
    pub fn issue(
        &self,
        holder: CertificateHolder,
        from: Duration,
        until: Duration,
    ) -> Result<String, KeygenError> {
        let claims = Claims {
            deployment: self.deployment.clone(),
            holder,
        };
        let mut parameters = parameters(&claims.to_string())?;
        let purpose = match holder {
            CertificateHolder::Leader => {
                let name = SanType::DnsName(Ia5String::try_from(LEADER_NAME)?);
                parameters.subject_alt_names.push(name);
                ExtendedKeyUsagePurpose::ServerAuth
            }
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        };
        parameters.extended_key_usages = vec![purpose];
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.not_before = date_time_ymd(1970, 1, 1) + from;
        parameters.not_after = date_time_ymd(1970, 1, 1) + until;
        parameters.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        Ok([
            certificate.pem(),
            key.serialize_pem(),
            self.certificate.clone(),
        ]
        .concat())
    }
}

/// Parameters of a certificate with this URI, which is its name as well.
fn parameters(uri: &str) -> Result<CertificateParams, KeygenError> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters
        .distinguished_name
        .push(DnType::CommonName, uri.to_owned());
    parameters.subject_alt_names = vec![SanType::URI(Ia5String::try_from(uri)?)];
    Ok(parameters)
}

fn root_parameters(deployment: &str) -> Result<CertificateParams, KeygenError> {
    let mut parameters = parameters(&format!("kvferry://{deployment}{ROOT_PATH}"))?;
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let from = since_1970().saturating_sub(CLOCK_SKEW);
    parameters.not_before = date_time_ymd(1970, 1, 1) + from;
    parameters.not_after = date_time_ymd(1970, 1, 1) + from + DAY * ROOT_DAYS;
    Ok(parameters)
}

fn read(directory: &OwnDirectory, name: &str) -> Result<String, KeygenError> {
    let bytes = directory.read(name);
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    text.map_err(|source| KeygenError::File {
        path: directory.path().join(name),
        source,
    })
}

fn write(directory: &OwnDirectory, name: &str, bytes: &[u8]) -> Result<(), KeygenError> {
    let written = directory.replace(name, bytes);
    written.map_err(|source| KeygenError::File {
        path: directory.path().join(name),
        source,
    })
}

/// Time since 1970; 0 before.
#[expect(
    clippy::disallowed_methods,
    reason = "certificates are valid by the time of the day"
)]
fn since_1970() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}
