//! `CUresult`, as defined in the header of the CUDA toolkit.

/// The error of a driver call. Success is `Ok`.
pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const DEVICE_UNAVAILABLE: Code = 46;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CAPTURE_INVALIDATED: Code = 901;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const ALREADY_REGISTERED: Code = 712;
pub(crate) const NOT_REGISTERED: Code = 713;

/// Errors after which every call of the context fails.
pub(crate) const fn poisons(code: Code) -> bool {
    matches!(code, 214 | 700 | 702 | 709 | 710 | 714..=719)
}

/// The name of an error, as `cuGetErrorName` returns it.
pub(crate) const fn name(code: Code) -> &'static std::ffi::CStr {
    match code {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        34 => c"CUDA_ERROR_STUB_LIBRARY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        DEVICE_UNAVAILABLE => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        CONTEXT_IS_DESTROYED => c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        CAPTURE_UNSUPPORTED => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        CAPTURE_INVALIDATED => c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        802 => c"CUDA_ERROR_SYSTEM_NOT_READY",
        801 => c"CUDA_ERROR_NOT_SUPPORTED",
        803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        _ => c"CUDA_ERROR_UNKNOWN",
    }
}
