# lookahead_thrust: the headers of Thrust and CUB, which come with the CUDA toolkit, for Thrust's host back ends. No
# compiler for devices is needed. There is no such target where the toolkit or TBB is missing.
find_package(CUDAToolkit QUIET)
find_path(LOOKAHEAD_THRUST thrust/version.h HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS /usr/local/cuda/include PATH_SUFFIXES cccl)
find_package(TBB QUIET)
if(LOOKAHEAD_THRUST AND TBB_FOUND)
  add_library(lookahead_thrust INTERFACE)
  target_include_directories(lookahead_thrust SYSTEM INTERFACE ${LOOKAHEAD_THRUST})
  target_compile_definitions(lookahead_thrust INTERFACE THRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP)
  target_link_libraries(lookahead_thrust INTERFACE TBB::tbb)
  find_package(OpenMP QUIET COMPONENTS CXX) # clang's is a package of its own
  if(OpenMP_CXX_FOUND)
    target_link_libraries(lookahead_thrust INTERFACE OpenMP::OpenMP_CXX)
  endif()
endif()
