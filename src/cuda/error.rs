//! What a driver may answer, in words.

/// A call that the driver refused, or an error of earlier work that it reports late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} answered {name} ({code})")]
pub struct CudaError {
    /// Which function of the driver.
    pub call: &'static str,
    /// `CUresult`, by the driver's own header.
    pub code: u32,
    /// The driver's name for it.
    pub name: &'static str,
}

impl CudaError {
    /// The context is broken, or may be: every later call fails, and only the end of the process makes the GPU usable again.
    ///
    /// Everything is taken for that but refusals that are known to be about one call (`CUresult` in the driver's reference):
    /// what a newer driver says is then never taken lightly.
    pub const fn is_fatal(self) -> bool {
        !matches!(
            self.code,
            // INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, MAP_FAILED to NOT_MAPPED, PEER_ACCESS_UNSUPPORTED,
            // OPERATING_SYSTEM, INVALID_HANDLE, NOT_FOUND, NOT_READY, PEER_ACCESS_ALREADY_ENABLED, _NOT_ENABLED, TOO_MANY_PEERS,
            // HOST_MEMORY_ALREADY_REGISTERED, _NOT_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED
            1 | 2 | 101 | 205
                ..=211 | 217 | 304 | 400 | 500 | 600 | 704 | 705 | 711 | 712 | 713 | 800 | 801
        )
    }
}

/// Why GPUs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoDriver {
    /// Nothing to load.
    #[error(
        "no CUDA driver is installed: libcuda.so.1 is not in the library path (in a container, start it with GPU access)"
    )]
    NoLibrary,
    /// It is older than the functions that are called.
    #[error("the CUDA driver has no {0}: install driver 525 (CUDA 12.0) or a newer one")]
    TooOld(&'static str),
    /// It does not start.
    #[error("the CUDA driver does not start: {error}{}", hint(error.code))]
    InitFailed {
        /// What `cuInit` said.
        error: CudaError,
    },
    /// It starts, and has no GPU.
    #[error(
        "the CUDA driver is there, and no GPU that this process may use (CUDA_VISIBLE_DEVICES hides them, too)"
    )]
    NoDevice,
}

const fn hint(code: u32) -> &'static str {
    match code {
        34 => {
            ": the library is a stub of the CUDA toolkit that was found before the driver's: take its folder out of \
             LD_LIBRARY_PATH"
        }
        803 => {
            ": the library and the kernel's driver differ in version: restart the machine after the update, or use the \
             container that fits the host's driver"
        }
        804 => {
            ": this driver is too new for the GPU's kind without the forward compatibility package"
        }
        _ => "",
    }
}
