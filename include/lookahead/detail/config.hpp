#pragma once
/// @file config.hpp
/// Version and the macros that let one source serve host and device. No macro here changes the layout of a type.

/// The version, read by CMake: major * 10000 + minor * 100 + patch.
#define LOOKAHEAD_VERSION 100

#if defined(__CUDACC__)
/// Marks a function that also runs on a device.
#define LOOKAHEAD_HD __host__ __device__
/// Precedes a function template over a group: it may be instantiated with a group of the host alone.
#define LOOKAHEAD_GROUP_FN _Pragma("nv_exec_check_disable")
#else
#define LOOKAHEAD_HD
#define LOOKAHEAD_GROUP_FN
#endif
