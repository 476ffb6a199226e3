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
    /// The context is broken: every later call fails, and only the end of the process makes the GPU usable again.
    ///
    /// By the description of each `CUresult` in the driver's reference ("the context cannot be used", "leaves the process
    /// in an inconsistent state").
    pub const fn is_fatal(self) -> bool {
        matches!(
            self.code,
            4 | 46 | 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 999
        )
    }

    /// No memory of the kind that was asked for.
    pub const fn is_out_of_memory(self) -> bool {
        self.code == 2
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
