# Every header must compile alone, and twice in one file, with the host compiler and with nvcc.
#   header_checks  each .hpp with the host compiler, and one file that includes them all (clang-tidy reads that one)
#   nvcc_checks    each .hpp and .cuh, tests/nvcc_*.cu and tests/gpu, with nvcc; needs LOOKAHEAD_NVCC_CHECKS

function(generate_header_sources output extension)
  set(sources "")
  set(all "")
  foreach(header IN LISTS ARGN)
    cmake_path(RELATIVE_PATH header BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/include OUTPUT_VARIABLE path)
    string(MAKE_C_IDENTIFIER ${path} name)
    set(source ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.${extension})
    file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${path}\"\n#include \"${path}\"\n")
    list(APPEND sources ${source})
    string(APPEND all "#include \"${path}\"\n")
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/headers/every_header.${extension})
  file(CONFIGURE OUTPUT ${source} CONTENT "${all}")
  set(${output} ${sources} ${source} PARENT_SCOPE)
endfunction()

# An adapter's header needs its engine. That of torch takes long and is the first line of its test.
set(checked_headers ${lookahead_headers})
list(FILTER checked_headers EXCLUDE REGEX "/adapters/torch.hpp$")
set(checked_with lookahead::lookahead)
if(TARGET lookahead::llama_cpp)
  list(APPEND checked_with lookahead::llama_cpp)
else()
  list(FILTER checked_headers EXCLUDE REGEX "/adapters/llama_cpp.hpp$")
endif()

generate_header_sources(header_sources cpp ${checked_headers})
add_library(header_checks OBJECT EXCLUDE_FROM_ALL ${header_sources})
target_link_libraries(header_checks PRIVATE ${checked_with} lookahead_warnings Threads::Threads)

option(LOOKAHEAD_NVCC_CHECKS "Add the target nvcc_checks (needs the CUDA toolkit)" OFF)
if(LOOKAHEAD_NVCC_CHECKS)
  enable_language(CUDA)
  generate_header_sources(header_sources cu ${checked_headers} ${lookahead_cuda_headers})
  file(GLOB nvcc_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/nvcc_*.cu ${PROJECT_SOURCE_DIR}/tests/gpu/*.cu)
  add_library(nvcc_checks OBJECT EXCLUDE_FROM_ALL ${header_sources} ${nvcc_sources})
  target_link_libraries(nvcc_checks PRIVATE ${checked_with} doctest::doctest)
  # The standard is named here because CMake 3.25 drops CUDA_STANDARD 20 in silence. -Wpedantic cannot be asked for: the
  # host code that nvcc writes is not pedantic.
  target_compile_options(nvcc_checks PRIVATE -std=c++20 -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Wconversion,-Werror)
endif()
